"""The runs of the part "numbers": commands of each case, one after the other in one folder."""

from __future__ import annotations

from scripts.behaviour.difference import ROOT
from scripts.behaviour.forks import Command
from scripts.behaviour.inputs import FAMILIES

STEPS = 20
_BF16 = "args.bf16=true"
_MICRO_2, _MICRO_1 = (f"deepspeed.train_micro_batch_size_per_gpu={n}" for n in (2, 1))
_EVALUATED = [
    "args.valid_data=[inputs/clips]",
    "args.eval_interval=10",
    "args.eval_iters=2",
    "args.eval_num_samples=1",
    "args.eval_sampling_steps=2",
]
_EXPORTED = "args.export=last"
_ROWS = [
    "data.target=cogfast.data.datasets.VideoManifest",
    "args.train_data=[inputs/pairs/rows.jsonl]",
]
_lora = lambda model: [
    "args.lora_rank=4",
    "args.lora_alpha=2",
    f"args.load=inputs/weights/{model}",
]
_LORA = _lora("5b")
_CHANNELS = "model.network_config.params.in_channels"
_GIVEN = "model.conditions=[frames]"
# 768 video tokens: seven blocks of 128 rows for sparse attention
_LARGE = [
    "data.params.video_size=[256,256]",
    "model.network_config.params.latent_height=32",
    "model.network_config.params.latent_width=32",
    "args.batch_size=1",
]


def _train(model: str, *words: str, ranks: int = 1, run: str = "run") -> Command:
    common = [
        f"args.run_folder={run}",
        f"args.train_iters={STEPS}",
        "args.log_interval=1",
        "args.num_workers=0",
        _EXPORTED,
    ]
    return Command(["train", "--base", f"inputs/{model}.yaml", *common, *words], ranks)


def _sample(*words: str, run: str = "run", out: str = "out") -> Command:
    prompt = ["--prompt", "bar number 1 moves", "--steps", "3", "--out", out]
    return Command(["sample", run, *prompt, *words])


def training_cases() -> dict[str, list[Command]]:
    """Return the commands of each case."""
    cases = {f"family {name}": [_train(name)] for name in FAMILIES}
    cases |= _quickstart() | _features() | _several_ranks() | _conditions()
    return cases


def _quickstart() -> dict[str, list[Command]]:
    words = ["args.warmup_steps=5", "args.batch_size=2", "args.eval_interval=10"]
    words += ["args.eval_iters=1", "args.eval_num_samples=1", "args.eval_sampling_steps=2"]
    more = {"fp32": ["deepspeed.bf16.enabled=false"], "bf16": ["args.eval_interval=null"]}
    return {f"quickstart {name}": [_train("quickstart", *words, *more[name])] for name in more}


def _features() -> dict[str, list[Command]]:
    fused = "deepspeed.optimizer.params"
    cached = "args.latent_cache=cache"
    cache = lambda model, *words: Command(
        ["cache", "--base", f"inputs/{model}.yaml", cached, "args.num_workers=0", *words]
    )
    lora = [*_LORA, "args.lora_modules=[q,k,v,out,fc1,fc2]"]
    int8 = [*_LORA, "args.quantize_base=int8"]
    words = {
        "evaluation": _EVALUATED,
        "lora": _LORA,
        "lora all modules": lora,
        "lora evaluated": [*_LORA, *_EVALUATED],
        "int8 base": int8,
        "fp8 base bf16": [*_LORA, _BF16, "args.quantize_base=fp8"],
        "int8 base, offloaded": [*int8, "args.offload_blocks=2"],
        "bf16": [_BF16],
        "fp32 accumulation": [_MICRO_2, "args.gradient_accumulation_steps=2"],
        "bf16 accumulation": [_BF16, _MICRO_2, "args.gradient_accumulation_steps=2"],
        "plain kernels": ["args.kernels=torch"],
        "math attention": ["args.attention_backend=math"],
        "ema": [
            f"{fused}.ema_decay=0.9",
            f"{fused}.use_num_updates=false",
            f"{fused}.betas=[0.8,0.99]",
        ],
        # The warm-up of the decay, (1 + t) / (10 + t), reaches it at step 12.
        "ema warm-up": [f"{fused}.ema_decay=0.6"],
        "8bit moments": ["args.optimizer_moments=8bit"],
        "ema on the host": ["args.ema_device=cpu"],
        "offloaded activations": [
            "args.activation_checkpointing=full",
            "args.offload_activations=true",
        ],
        "AdamW": ["deepspeed.optimizer.type=AdamW"],
        "Prodigy": ["deepspeed.optimizer.type=Prodigy", "args.lr=1"],
        "Muon": ["deepspeed.optimizer.type=Muon"],
        "clipping": ["deepspeed.gradient_clipping=0.05"],
        "buckets and pictures": [
            _ROWS[0],
            "args.train_data=[inputs/pairs/pictures.jsonl]",
            "data.params.buckets=[[9,32,32],[1,32,32]]",
            "data.params.bucket_batch=[1,2]",
        ],
        "loss mask": [*_ROWS, "model.loss_fn_config.params.masked=0.1"],
        "prior": [*_ROWS[:1], "args.train_data=[inputs/pairs/prior.jsonl]", *_LORA],
        "trainable modules": ["model.trainable_modules=[attention]", "args.export=none"],
        "sat frames": ["data.params.frame_selection=sat", "data.params.fps=4"],
        "frames at 4 fps": ["data.params.fps=4"],
        "uniform frames": ["data.params.frame_selection=uniform", "data.params.resize=stretch"],
        "another seed": ["args.seed=7"],
    }
    for policy in ("full", "attention_kept", "pointwise"):
        words[f"checkpointing {policy}"] = [f"args.activation_checkpointing={policy}"]
    for schedule in ("sat", "linear", "cosine", "cosine_with_restarts", "polynomial"):
        more = ["args.warmup_steps=4", "args.lr_first_step=0", "args.min_lr_ratio=0.1"]
        more = [] if schedule == "sat" else more
        more += ["args.lr_num_cycles=2"] if "restarts" in schedule else []
        words[f"schedule {schedule}"] = [
            f"args.lr_schedule={schedule}",
            "args.mode=finetune",
        ] + more
    cases = {name: [_train("5b", *given)] for name, given in words.items()}
    sparse = ["args.attention=sparse:0.6", *_LARGE]
    cases["sparse"] = [_train("5b", *sparse, "args.train_iters=8"), _sample()]
    cases["sparse warm-up, full"] = [
        _train(
            "1.5_5b",
            *sparse,
            "args.train_iters=8",
            "args.sparse_warmup=4",
            "args.activation_checkpointing=full",
        )
    ]
    cases["lora i2v"] = [_train("1.5_5b_i2v", *_lora("1.5_5b_i2v"))]
    cases["lora 2b"] = [_train("2b", *_lora("2b"))]
    cases["cached"] = [cache("5b"), _train("5b", cached)]
    noised = ["args.cached_noised_images=2"]
    cases["cached i2v"] = [cache("5b_i2v"), _train("5b_i2v", cached)]
    cases["cached noised images"] = [
        cache("1.5_5b_i2v", *noised),
        _train("1.5_5b_i2v", cached, *noised),
    ]
    cases["encode first"] = [_train("5b", cached, "args.encode_first=true")]
    cases["loaded, new channels"] = [
        _train("5b", "args.train_iters=3"),
        _train(
            "5b",
            *_ROWS,
            "args.load=run",
            "model.conditions=[control]",
            "model.new_channels=zero",
            f"{_CHANNELS}=16",
            run="wide",
        ),
    ]
    cases["loaded lora"] = [
        _train("5b", *_LORA, "args.train_iters=3"),
        _train("5b", *_LORA, "args.load_lora=run", run="more"),
    ]
    cases["sample"] = [
        _train("5b", "args.train_iters=5"),
        _sample("--ema"),
        _sample("--no-ema", "args.only_save_latents=true", "--guidance", "2", out="latents"),
        _sample("--num-videos", "2", "--size", "32x16", "--seed", "5", out="wide"),
    ]
    cases["sample lora"] = [_train("2b", *_lora("2b"), "args.train_iters=5"), _sample()]
    cases["sample i2v"] = [
        _train("5b_i2v", "args.train_iters=5"),
        _sample("--image", "inputs/pairs/masks/1.png"),
    ]
    return cases


def _several_ranks() -> dict[str, list[Command]]:
    both = lambda model, *words: [_train(model, _MICRO_2, *words, ranks=2)]
    all_of_one = lambda model, *words: [_train(model, *words, ranks=2)]
    cases = {f"zero {stage}": both("5b", f"args.zero_stage={stage}") for stage in range(4)}
    tensor, context = "args.model_parallel_size=2", "args.context_parallel_size=2"
    return cases | {
        "zero 2, evaluated": both("5b", *_EVALUATED),
        "zero 3, evaluated": both("5b", *_EVALUATED, "args.zero_stage=3"),
        "zero 2 bf16 accumulation": [
            _train("5b", _BF16, _MICRO_1, "args.gradient_accumulation_steps=2", ranks=2)
        ],
        "zero 3 lora": both("5b", "args.zero_stage=3", *_LORA),
        "zero 1 8bit moments": both("5b", "args.zero_stage=1", "args.optimizer_moments=8bit"),
        "Muon on two ranks": both("5b", "deepspeed.optimizer.type=Muon"),
        "Prodigy on two ranks": both("5b", "deepspeed.optimizer.type=Prodigy", "args.lr=1"),
        "tp 2": all_of_one("5b", tensor),
        "tp 2 rows": all_of_one("5b", tensor, "args.sequence_parallel=true"),
        "tp 2 lora": all_of_one("2b", tensor, *_lora("2b")),
        "tp 2 evaluated": all_of_one("5b", tensor, *_EVALUATED),
        "cp 2": all_of_one("5b", context),
        "cp 2 i2v": all_of_one("1.5_5b_i2v", context),
        "cp 2 lora full": all_of_one("5b", context, *_LORA, "args.activation_checkpointing=full"),
        "sparse tp 2": all_of_one(
            "5b", tensor, "args.attention=sparse:0.6", *_LARGE, "args.train_iters=6"
        ),
    }


def _conditions() -> dict[str, list[Command]]:
    own = lambda channels, *words: [*_ROWS, f"{_CHANNELS}={channels}", *words]
    inpainting = own(17, "model.conditions=[mask,masked_video]")
    dropped = "model.condition_dropout=0.3"
    pairs = "inputs/pairs"
    cases = {
        "image and control": [
            _train("5b", *own(24, "model.conditions=[image,control]", dropped)),
        ],
        "control": [
            _train("5b", *own(16, "model.conditions=[control]", dropped)),
            _sample("--control", f"{pairs}/controls/2.mp4"),
        ],
        "inpainting": [
            _train("5b", *inpainting),
            _sample("--video", "inputs/clips/videos/1.mp4", "--mask", f"{pairs}/masks/1.png"),
        ],
        "inpainting with noise 1.5": [
            _train("1.5_5b", *inpainting, "model.masked_video_noise=true"),
        ],
        "inpainting, drawn masks": [
            _train("2b", f"{_CHANNELS}=17", "model.conditions=[mask,masked_video]")
        ],
    }
    for given in ("first_last", "random", "prefix:5", "all"):
        words = [f"{_CHANNELS}=16", _GIVEN, f"model.given_frames='{given}'", dropped]
        cases[f"frames {given}"] = [_train("5b", *words)]
    first, last = "inputs/pairs/masks/0.png", "inputs/pairs/masks/2.png"
    cases["frames first_last"].append(_sample("--first-frame", first, "--last-frame", last))
    return cases


def plan_cases() -> dict[str, list[Command]]:
    """Return `cogfast plan` of the rows of docs/small_cards.md, and for each file of configs/."""
    full, eight = "args.activation_checkpointing=full", "args.optimizer_moments=8bit"
    int8, host = "args.quantize_base=int8", "args.ema_device=cpu"
    activations = "args.offload_activations=true"
    blocks = lambda model: f"args.offload_blocks={30 if model == '_2b' else 42}"
    cases = {}

    def plan(name: str, model: str, mode: str, *words: str, gpu: str = "h100-80") -> None:
        files = [f"cogvideox{model}.yaml", *(["lora.yaml"] if mode == "lora" else []), "sft.yaml"]
        base = [str(ROOT / "configs" / file) for file in files]
        cached = ["args.latent_cache=cache", "args.train_data=[clips]"]
        cases[f"plan {model[1:] if model[0] == '_' else model} {mode} {name}"] = [
            Command(["plan", "--base", *base, "--gpu", gpu, *cached, *words])
        ]

    for model in ("_2b", "_5b", "1.5_5b_i2v"):
        plan("none", model, "lora", "args.activation_checkpointing=none")
        plan("full", model, "lora", full)
        plan("int8", model, "lora", full, int8)
        plan("blocks", model, "lora", full, blocks(model))
        plan("activations", model, "lora", full, activations)
        plan("all", model, "lora", full, blocks(model), activations, eight, host)
    for model in ("_2b", "_5b"):
        plan("none", model, "sft", "args.activation_checkpointing=none")
        plan("full", model, "sft", full)
        plan("activations", model, "sft", full, activations)
        plan("ema", model, "sft", full, host)
        plan("8bit", model, "sft", full, eight)
        plan("all", model, "sft", full, activations, eight, host)
    plan("8bit and ema", "_5b", "sft", full, eight, host)
    plan("all and int8", "_5b", "lora", full, int8, blocks("_5b"), activations, eight, host)
    plan("int8 and blocks", "1.5_5b", "lora", full, int8, blocks("1.5_5b"))
    plan("all", "1.5_5b", "sft", full, activations, eight, host)
    plan("fit", "1.5_5b_i2v", "lora", "args.fit=auto", gpu="4090")
    plan("fit", "_5b", "sft", "args.fit=auto", gpu="l40s")
    for model in ("_2b", "_5b", "_5b_i2v", "1.5_5b", "1.5_5b_i2v"):
        plan("as configured", model, "sft")
    configs = ROOT / "configs"
    for path in sorted((configs / "conditions").glob("*.yaml")):
        model = "cogvideox_5b_i2v" if path.stem == "first_last" else "cogvideox_5b"
        base = [str(configs / f"{model}.yaml"), str(path), str(configs / "sft.yaml")]
        cases[f"plan {path.stem}"] = [Command(["plan", "--base", *base, "--gpu", "h100-80"])]
    quickstart = ["--base", str(configs / "quickstart.yaml"), "--gpu", "4090"]
    cases["plan quickstart"] = [Command(["plan", *quickstart])]
    sharded = ["--gpus", "8", "args.context_parallel_size=2", "args.zero_stage=3"]
    base = [str(configs / name) for name in ("cogvideox1.5_5b.yaml", "sft.yaml")]
    cases["plan 8 GPUs"] = [Command(["plan", "--base", *base, "--gpu", "h100-80", *sharded])]
    return cases
