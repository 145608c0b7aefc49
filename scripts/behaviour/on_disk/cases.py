"""The recorded cases: what made the files of a fixture, and what is done with these files.

All paths are relative to a scratch folder with the files of data.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.behaviour.on_disk.launch import BUCKET, command, torchrun

NETWORK = "model.network_config.params"
TWO_HEADS = (f"{NETWORK}.hidden_size=32", f"{NETWORK}.num_attention_heads=2")
MODULES = f"{NETWORK}.modules"
ENCODER = "model.conditioner_config.params.emb_models"
LOSS = "model.loss_fn_config.params"
DATASETS = "cogfast.data.datasets"
LISTS = (f"data.target={DATASETS}.VideoList", "args.train_data=[data/lists]")
TABLE = (f"data.target={DATASETS}.VideoManifest", "args.train_data=[data/lists/table.jsonl]")
LORA = ("args.lora_rank=2", "args.load=data/base")
PROMPT = ("--prompt", "a red bar", "--steps", "2")
PRIOR = (TABLE[0], "args.train_data=[data/lists/prior.jsonl]", *LORA)
TENSORS = "data.params.tensors={noise: [8, 3, 4, 4], flow: [2, 3, 4, 4]}"


CSV = (f"data.target={DATASETS}.VideoManifest", "args.train_data=[data/lists/table.csv]")
CSV += ("args.max_bad_fraction=0.5",)
SPANS = (f"data.target={DATASETS}.VideoManifest", "args.train_data=[data/lists/spans.jsonl]")
SHARDS = ("data.target=data_video.VideoDataset", "args.train_data=[data/shards]")
CONTROL = ("model.conditions=[control]", f"{NETWORK}.in_channels=16")
INPAINTING = ("model.conditions=[mask, masked_video]", f"{NETWORK}.in_channels=17")
# Runs of these read all data once, so that its indices are complete. The first makes data/base.
SOURCES = (
    (),
    LISTS,
    (*LISTS, *CONTROL),
    (*LISTS, *INPAINTING, "data.params.mask_column=masks.txt"),
    TABLE,
    (*TABLE, *CONTROL),
    (*TABLE, *INPAINTING),
    (*TABLE, TENSORS),
    CSV,
    SPANS,
    SHARDS,
)


@dataclass(frozen=True)
class Stage:
    """One launch. fault: the end of the name to which a draft of a checkpoint is renamed when the
    process kills itself."""

    name: str
    program: list[str]
    ranks: int = 1
    fault: str = ""


@dataclass(frozen=True)
class Case:
    """before: what the recorded files are from; a comparison also does it from the data alone. after:
    what is done with the recorded files. folders: where the files of the case are."""

    name: str
    before: tuple[Stage, ...]
    after: tuple[Stage, ...]
    folders: tuple[str, ...]
    is_stored: bool = False
    is_small: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def has_cache(self) -> bool:
        return self.is_stored or any(name.startswith("caches/") for name in self.folders)

    @property
    def user(self) -> str:
        return f"user/{self.name}"


def train(name: str, *words: str, family: str = "5b", resume: str = "") -> list[str]:
    """Return the words of a run. resume: what it resumes; "" for a run of 2 of 7 steps."""
    base = ["--base", f"configs/{family}.yaml", "configs/sft.yaml", f"args.run_folder=runs/{name}"]
    end = ["--resume", resume] if resume else ["args.exit_interval=2"]
    return command("train", *base, *words, *end)


def run(
    name: str,
    *words: str,
    ranks: int = 1,
    resume_ranks: int | None = None,
    family: str = "5b",
    more: Sequence[tuple[str, ...]] = (),
    folders: Sequence[str] = (),
    resume_words: Sequence[str] = (),
    **options,
) -> Case:
    """Return a case of a run of 2 steps that is resumed for 5 more.

    more: words of commands behind that. {} in them is the run's folder, {out} that of new files.
    """
    size = (f"args.batch_size={4 // ranks}",) if ranks > 1 else ()
    after_ranks = resume_ranks or ranks
    after_size = (f"args.batch_size={4 // after_ranks}",)
    if any("parallel_size" in word for word in words):
        size = after_size = ("args.batch_size=4",)
    before = [Stage("train", train(name, *size, *words, family=family), ranks)]
    program = train(name, *after_size, *words, *resume_words, family=family, resume="latest")
    after = [Stage("resume", program, after_ranks)]
    for number, own in enumerate(more):
        given = [word.format(f"runs/{name}", out=f"out/{name}") for word in own]
        after.append(Stage(f"{number + 2} {own[0]}", command(*given)))
    own = (f"runs/{name}", f"out/{name}", *folders)
    return Case(name, tuple(before), tuple(after), own, **options)


SAMPLE = ("sample", "{}", *PROMPT, "--out", "{out}/videos")
REPORT = ("report", "{}")


def _convert(to: str, *words: str) -> tuple[str, ...]:
    name = "-".join((to, *(word.strip("-") for word in words)))
    return ("convert", "{}", "{out}/" + name, "--to", to, *words)


RUNS = (
    run(
        "full",
        is_small=True,
        more=(
            REPORT,
            SAMPLE,
            _convert("diffusers", "--ema"),
            _convert("sat"),
            ("sample", "{}", *PROMPT, "--out", "{out}/raw", "--no-ema", "--num-videos", "2"),
        ),
    ),
    run(
        "lora",
        *LORA,
        "args.export=all",
        more=(
            SAMPLE,
            _convert("peft", "--ema"),
            ("convert", "data/base", "{out}/sat", "--to", "sat", "--add-lora", "{}"),
            ("convert", "data/base", "{out}/merged", "--to", "diffusers", "--merge-lora", "{}"),
        ),
    ),
    run("export", "args.export=last", "args.export_interval=2", "args.save_interval=2"),
    run(
        "evaluated",
        *TABLE,
        "args.eval_interval=2",
        "args.eval_at_start=true",
        "args.eval_at_end=true",
        "args.eval_sampling_steps=2",
        "args.keep_best=-valid_loss",
        "args.save_interval=2",
        "args.wandb=true",
        "args.strict_eval=true",
        variables={"COGFAST_WANDB": "out/evaluated/wandb.jsonl"},
    ),
    run("2b", family="2b", more=(SAMPLE,)),
    run("1.5", family="1.5_5b"),
    run(
        "i2v",
        *LISTS,
        "data.params.image_column=images.txt",
        "args.lora_rank=2",
        "args.load=data/base-i2v",
        family="5b_i2v",
        more=(("sample", "{}", *PROMPT, "--image", "data/lists/images/1.png", "--out", "{out}/v"),),
    ),
    run("1.5-i2v", "args.num_workers=1", family="1.5_5b_i2v"),
    run("zero0", "args.zero_stage=0"),
    run("zero1", "args.zero_stage=1", ranks=2, resume_ranks=1),
    run("zero2", ranks=2),
    run("zero3", "args.zero_stage=3", ranks=2),
    run("zero3-lora", "args.zero_stage=3", *LORA, ranks=2, resume_ranks=1),
    run("tp2", *TWO_HEADS, f"{NETWORK}.num_layers=1", "args.model_parallel_size=2", ranks=2),
    run(
        "tp2-rows",
        *TWO_HEADS,
        f"{NETWORK}.num_layers=1",
        "args.model_parallel_size=2",
        "args.sequence_parallel=true",
        ranks=2,
    ),
    run("cp2", *TWO_HEADS, f"{NETWORK}.num_layers=1", "args.context_parallel_size=2", ranks=2),
    run("int8", *LORA, "args.quantize_base=int8", more=(_convert("peft"), SAMPLE)),
    run("moments8", "args.optimizer_moments=8bit"),
    run("ema-cpu", "args.ema_device=cpu", "args.gradient_accumulation_steps=2"),
    run("bf16", "args.bf16=true"),
    run("prodigy", "deepspeed.optimizer.type=Prodigy", "args.lr=1"),
    run("muon", "deepspeed.optimizer.type=Muon"),
    run("adamw", "deepspeed.optimizer.type=AdamW"),
    run("accumulated", "args.gradient_accumulation_steps=2", "args.batch_size=2", "args.seed=7"),
    run(
        "control",
        *LISTS,
        "model.conditions=[control]",
        f"{NETWORK}.in_channels=16",
        "model.condition_dropout=0.2",
        more=(
            ("sample", "{}", *PROMPT, "--control", "data/lists/controls/2.mp4", "--out", "{out}/v"),
        ),
    ),
    run(
        "image-control",
        *TABLE,
        "model.conditions=[image, control]",
        f"{NETWORK}.in_channels=24",
    ),
    run(
        "first-last",
        "model.conditions=[frames]",
        "model.given_frames=first_last",
        f"{NETWORK}.in_channels=16",
        more=(
            ("sample", "{}", *PROMPT, "--first-frame", "data/lists/images/1.png", "--last-frame")
            + ("data/lists/images/2.png", "--out", "{out}/v"),
        ),
    ),
    run(
        "random-frames",
        "model.conditions=[frames]",
        "model.given_frames=random",
        f"{NETWORK}.in_channels=16",
    ),
    run(
        "prefix",
        "model.conditions=[frames]",
        "model.given_frames='prefix:5'",
        f"{NETWORK}.in_channels=16",
    ),
    run(
        "inpainting",
        "model.conditions=[mask, masked_video]",
        "model.masked_video_noise=true",
        f"{NETWORK}.in_channels=17",
        more=(
            ("sample", "{}", *PROMPT, "--video", "data/lists/clips/1.mp4", "--mask")
            + ("data/lists/mask.png", "--out", "{out}/v"),
        ),
    ),
    run(
        "masks",
        *LISTS,
        "data.params.mask_column=masks.txt",
        "model.conditions=[mask, masked_video]",
        f"{NETWORK}.in_channels=17",
    ),
    run("prior", *PRIOR, f"{LOSS}.masked=0.1", f"{LOSS}.prior_weight=0.5"),
    run(
        "new-channels",
        *LISTS,
        "model.conditions=[control]",
        f"{NETWORK}.in_channels=16",
        "model.new_channels=zero",
        "args.load=data/base",
    ),
    run("sparse", "args.attention=sparse:0.5", "args.sparse_warmup=4"),
    run(
        "csv",
        *CSV,
    ),
    run(
        "spans",
        f"data.target={DATASETS}.VideoManifest",
        "args.train_data=[data/lists/spans.jsonl, data/lists/theirs.json]",
        "args.train_data_weights=[1, 2]",
        "args.split=0.8,0.2,0",
    ),
    run(
        "shards",
        *SHARDS,
        folders=("user/shards",),
    ),
    run(
        "index",
        "args.train_data=[data/unread]",
        folders=("data/unread",),
    ),
    run(
        "buckets",
        *LISTS,
        "data.params.buckets=[[1, 32, 32], [9, 32, 32], [9, 16, 32]]",
        "args.batch_size=2",
    ),
    run(
        "own-network",
        *TABLE,
        TENSORS,
        f"{ENCODER}.0.target=own_network.Shouting",
        "model.network_config.target=own_network.TrajectoryTransformer",
        "model.trainable_modules=[fuser, traj_extractor]",
        "args.load=data/base",
        "--allow-import",
        "own_network",
    ),
)


def _finetune(name: str, *words: str, kind: str = "lora", steps: int = 2) -> list[str]:
    given = {
        "model_path": "data/pipeline",
        "model_name": "cogvideox-t2v",
        "model_type": "t2v",
        "training_type": kind,
        "output_dir": f"runs/{name}",
        "data_root": "data/lists",
        "caption_column": "prompts.txt",
        "video_column": "videos.txt",
        "train_resolution": "9x32x32",
        "train_steps": str(steps),
        "checkpointing_steps": "2",
        "checkpointing_limit": "1",
        "latent_cache": f"caches/{name}",
        "num_workers": "0",
        "batch_size": "2",
        "rank": "2",
        "lora_alpha": "1",
        "lr_scheduler": "constant",
        "lr_warmup_steps": "0",
    }
    options = [word for key, value in given.items() for word in (f"--{key}", value)]
    small = "deepspeed.zero_optimization.reduce_bucket_size=100000"
    return [*options, *words, small, "args.log_interval=1"]


def _finetune_case(name: str, *words: str, kind: str = "lora", is_own: bool = False) -> Case:
    program = ["own/own_finetune.py"] if is_own else command("finetune")
    more = ("--resume_from_checkpoint", "latest")
    before = Stage("train", [*program, *_finetune(name, *words, kind=kind)])
    after = Stage("resume", [*program, *_finetune(name, *words, *more, kind=kind, steps=7)])
    folders = (f"runs/{name}", f"caches/{name}", f"user/{name}")
    return Case(name, (before,), (after,), folders, is_small=name == "finetune-lora")


VALIDATION = (
    "--do_validation",
    "true",
    "--validation_steps",
    "2",
    "--validation_dir",
    "data/lists",
)
VALIDATION += ("--validation_prompts", "prompts.txt", "args.eval_sampling_steps=2")
FINETUNE = (
    _finetune_case("finetune-lora"),
    _finetune_case("finetune-sft", *VALIDATION, kind="sft"),
    _finetune_case("finetune-own", is_own=True),
    run("finetune-names", "args.folder_layout=finetune", "args.export=last", more=(REPORT,)),
)


def _cached(
    name: str, *words: str, family: str = "5b", cache: str = "", is_small: bool = False, **options
) -> Case:
    """A cache, and a run of 2 steps from it. Afterwards `cogfast cache` finds all, and so does the run."""
    place = cache or f"caches/{name}"
    words = (*words, f"args.latent_cache={place}")
    base = ["--base", f"configs/{family}.yaml", "configs/sft.yaml"]
    fill = command("cache", *base, *words)
    before = (Stage("cache", fill), Stage("train", train(name, *words, family=family)))
    after = (
        Stage("cache again", fill),
        Stage("resume", train(name, *words, family=family, resume="latest")),
    )
    folders = (f"caches/{name}", f"runs/{name}", f"user/{name}")
    return Case(name, before, after, folders, is_small=is_small, **options)


CACHES = (
    _cached("cache", is_small=True),
    _cached("cache-noised-images", "args.cached_noised_images=2", family="5b_i2v"),
    _cached("cache-images", *LISTS, "data.params.image_column=images.txt", family="1.5_5b_i2v"),
    _cached(
        "cache-frames",
        *LISTS,
        "model.conditions=[control, frames]",
        "model.given_frames=first_last",
        f"{NETWORK}.in_channels=24",
    ),
    _cached("cache-masks", *PRIOR, f"{LOSS}.masked=0.1"),
    _cached("cache-tensors", *TABLE, TENSORS),
    _cached("cache-shards", *SHARDS),
    _cached(
        "cache-bad",
        *CSV,
    ),
    _cached(
        "cache-spans",
        *SPANS,
    ),
    _cached(
        "cache-buckets",
        *LISTS,
        "data.params.buckets=[[1, 32, 32], [9, 32, 32]]",
        "args.batch_size=2",
    ),
    _cached(
        "cache-own",
        f"{ENCODER}.0.target=own_network.Shouting",
        "--allow-import",
        "own_network",
    ),
    _cached("cache-vae", family="5b_vae"),
    run(
        "encode-first",
        "args.encode_first=true",
        "args.latent_cache=caches/encode-first",
        folders=("caches/encode-first",),
    ),
)


def _stored(name: str, *words: str, **options) -> Case:
    """A run in a store: of the data and the cache there."""
    url = f"s3://{BUCKET}"
    words = (f"args.run_folder={url}/runs/{name}", f"args.train_data=[{url}/data]", *words)
    before = Stage("train", train(name, *words))
    after = Stage("resume", train(name, *words, resume="latest"))
    more = Stage("sample", command("sample", f"{url}/runs/{name}", *PROMPT, "--out", f"out/{name}"))
    report = ["report", f"{url}/runs/{name}", "--out", f"out/{name}/page.html"]
    folders = ("bucket", f"user/{name}", f"out/{name}")
    after = (after, more, Stage("report", command(*report)))
    return Case(name, (before,), after, folders, is_stored=True, **options)


def _special() -> tuple[Case, ...]:
    own = ["own/own_trainer.py", *train("own-trainer", *TABLE, TENSORS)[3:]]
    own_resumed = [
        "own/own_trainer.py",
        *train("own-trainer", *TABLE, TENSORS, resume="latest")[3:],
    ]
    saves = ("args.save_interval=2", "args.keep_last=0")
    killed, replaced = "runs/killed", "runs/replaced"
    elastic = ("args.elastic=shrink", "deepspeed.train_batch_size=4")
    return (
        Case(
            "own-trainer",
            (Stage("train", own),),
            (Stage("resume", own_resumed),),
            ("runs/own-trainer",),
        ),
        # Killed when its second checkpoint gets its name, and when the first one gives way to a new one.
        Case(
            "killed",
            (
                Stage("train", train("killed", *saves)),
                Stage("killed", train("killed", *saves, resume=killed), fault="4"),
            ),
            (Stage("resume", train("killed", *saves, resume="latest")),),
            ("runs/killed",),
        ),
        Case(
            "replaced",
            (
                Stage("train", train("replaced", *saves)[:-1] + ["args.exit_interval=4"]),
                Stage(
                    "killed",
                    train("replaced", *saves, resume=f"{replaced}/checkpoints/00000002"),
                    fault="00000004",
                ),
            ),
            (Stage("resume", train("replaced", *saves, resume="latest")),),
            ("runs/replaced",),
        ),
        Case(
            "elastic",
            (Stage("train", torchrun(2, *train("elastic", *elastic)[2:])),),
            (Stage("resume", torchrun(1, *train("elastic", *elastic)[2:-1])),),
            ("runs/elastic",),
        ),
    )


STORED = (_stored("stored", f"args.latent_cache=s3://{BUCKET}/cache", "args.encode_first=true"),)
CASES: tuple[Case, ...] = (*RUNS, *FINETUNE, *CACHES, *_special(), *STORED)
