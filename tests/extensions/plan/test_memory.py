"""The predicted memory of a run: PyTorch's allocator, ZeRO's state against its rules, encoders against
diffusers and transformers."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cogfast.config import Config
from cogfast.extensions.plan.command import describe_plan
from cogfast.extensions.plan.memory import GIB, plan_memory, setup_of
from cogfast.extensions.plan.zero import num_trained
from cogfast.train.keys import TrainKeys
from tests.support.refusals import Refusal, assert_command_refused, refusals
from tests.support.runs import run_of
from tests.support.tiny_run import ROOT

CONFIGS = ROOT / "configs"
CACHED = ("args.latent_cache=cache", "args.activation_checkpointing=full")


def config_of(name: str, *words: str, lora: bool = False) -> tuple[Config, TrainKeys]:
    files = [CONFIGS / f"cogvideox{name}.yaml", CONFIGS / "sft.yaml"]
    files[1:1] = [CONFIGS / "lora.yaml"] if lora else []
    config = run_of(*files).config("args.train_data=[clips]", *words)
    return config, config.run.args


def plan_of(name: str, *words: str, lora: bool = False, card: int | None = None, gpus: int = 1):
    config, args = config_of(name, *words, lora=lora)
    return plan_memory(setup_of(config.run, gpus), card)


INT8, BLOCKS = "args.quantize_base=int8", "args.offload_blocks=42"
MOVED = "args.offload_activations=true"
STATE = "args.optimizer_moments=8bit args.ema_device=cpu"
TENSOR, CONTEXT = "args.model_parallel_size=2", "args.context_parallel_size=2"
ZERO3 = "deepspeed.zero_optimization.stage=3"
EMA_BUFFER = 1 / 16  # GiB of a second buffer of the EMA, which is gone since they were counted
# GiB that PyTorch's allocator counted on a CUDA runtime that computes nothing (docs/small_cards.md and
# docs/diagnostics.md), for one or two ranks: batch size 1, cached latents, bf16, attention_backend=flash.
ALLOCATOR = [
    ("_5b", True, "full", INT8, 1, 13.98),
    ("_5b", True, "full", BLOCKS, 1, 9.26),
    ("_5b", True, "full", MOVED, 1, 15.27),
    ("_5b", True, "full", f"{INT8} {BLOCKS} {MOVED} {STATE}", 1, 4.07 - EMA_BUFFER),
    ("1.5_5b", True, "full", f"{INT8} {BLOCKS}", 1, 18.94),
    ("_5b", False, "full", STATE, 1, 59.04 - EMA_BUFFER),
    ("1.5_5b", False, "full", f"{STATE} {MOVED}", 1, 59.87 - EMA_BUFFER),
    ("_2b", False, "full", "", 1, 34.92),
    ("_2b", False, "attention_kept", "", 1, 35.90),
    ("_2b", False, "pointwise", "", 1, 50.51),
    ("_2b", False, "none", "", 1, 67.11),
    ("_2b", True, "full", "", 1, 7.59),
    ("_5b", True, "pointwise", "", 1, 61.63),
    ("_5b", True, "none", "", 1, 70.00),
    ("_5b_i2v", False, "none", "", 1, 183.58),
    ("1.5_5b_i2v", True, "full", "", 1, 29.03),
    ("_2b", False, "full", "", 2, 21.41),
    ("_2b", False, "pointwise", "", 2, 39.74),
    ("_2b", False, "full", ZERO3, 2, 22.19),
    ("_5b", False, "full", TENSOR, 2, 57.46),
    ("_5b", False, "full", CONTEXT, 2, 60.46),
    ("_5b", True, "full", "", 2, 19.88),
]


@pytest.mark.parametrize(("model", "lora", "policy", "words", "ranks", "gib"), ALLOCATOR)
def test_a_step_takes_what_the_allocator_counted(
    tmp_path: Path, model: str, lora: bool, policy: str, words: str, ranks: int, gib: float
) -> None:
    content: Any = OmegaConf.load(CONFIGS / f"cogvideox{model}.yaml")
    for key in ("conditioner_config", "first_stage_config"):
        del content["model"][key]
    OmegaConf.save(content, tmp_path / "model.yaml")
    frames, rows, columns = (81, 768, 1360) if model.startswith("1.5") else (49, 480, 720)
    given = ["args.train_data=[clips]", "args.latent_cache=cache", *words.split()]
    given += [f"data.params.video_size=[{rows},{columns}]", f"data.params.max_num_frames={frames}"]
    given += ["deepspeed.bf16.enabled=true", "deepspeed.fp16.enabled=false"]
    given += [f"args.activation_checkpointing={policy}"]
    files = [tmp_path / "model.yaml", *([CONFIGS / "lora.yaml"] if lora else [])]
    config = run_of(*files, CONFIGS / "sft.yaml").config(*given)
    plan = plan_memory(setup_of(config.run, ranks), None)
    assert plan.step_peak / GIB == pytest.approx(gib, rel=0.006)


def test_a_rank_may_have_only_text() -> None:
    """A picture of 480x720 has 1,576 rows, 226 of them text: 197 on each of eight ranks."""
    words = [*CACHED, "data.params.max_num_frames=1", "args.activation_checkpointing=none"]
    few, many = (
        plan_of("_5b", *words, f"args.context_parallel_size={ranks}", lora=True, gpus=ranks)
        for ranks in (4, 8)
    )
    assert many.step_peak < few.step_peak


def test_state_of_the_optimizer_by_stage_and_ranks() -> None:
    """Counted by hand: 2 + 2 bytes of weights and gradients, 16 of float32 state, for 2B in fp16."""
    numel = 1_693_775_960
    plan = plan_of("_2b", *CACHED)
    parts = dict(plan.phases[0].parts)
    trained = num_trained(plan.setup.transformer)
    assert trained == pytest.approx(numel, rel=0.001)
    assert parts["master weights"] == parts["EMA"] == 4 * trained
    assert parts["moments"] == 8 * trained
    step = next(phase for phase in plan.phases if phase.name == "optimizer step")
    assert step.parts["gradients"] == 2 * trained
    eight = plan_of("_2b", *CACHED, gpus=8).phases[0].parts
    assert eight["moments"] == pytest.approx(parts["moments"] / 8, rel=1e-6)
    assert eight["weights"] == parts["weights"]
    whole = plan_of("_2b", *CACHED, "deepspeed.zero_optimization.stage=3", gpus=8).phases[0].parts
    assert whole["weights"] < parts["weights"] / 7
    adam = "deepspeed.optimizer.type=AdamW"
    assert plan_of("_2b", *CACHED, adam).phases[0].parts["EMA"] == 0


def test_encoders_count_where_they_are_used() -> None:
    parts = lambda *words, **kind: dict(plan_of("_5b", *words, **kind).phases[0].parts)
    t5, vae = 2 * 4_762_310_656, 2 * 215_583_907
    assert parts("args.activation_checkpointing=full")["encoders"] == t5 + vae
    assert parts(*CACHED)["encoders"] == 0
    # Image-to-video encodes the noised first frame in every step.
    image = plan_of("_5b_i2v", *CACHED)
    assert image.phases[0].parts["encoders"] == vae
    evaluated = plan_of("_5b", *CACHED, "args.eval_interval=5", "args.eval_prompts=[a]")
    names = [phase.name for phase in evaluated.phases]
    assert names == ["training", "optimizer step", "evaluation", "decoding"]


@pytest.mark.soak
def test_upstream_files_plan_without_error(sat_configs: Path) -> None:
    models = sorted(sat_configs.glob("cogvideox*.yaml"))
    assert len(models) == 8
    training = [[model, sat_configs / "sft.yaml"] for model in models]
    for files in (*training, models[:1], [models[0], sat_configs / "inference.yaml"]):
        text = describe_plan(run_of(*files).config().run, "h100-80", 1)
        assert "peak: " in text and max(map(len, text.splitlines())) <= 120


def plan_command(*words: str) -> list[str]:
    return run_of("cogvideox_5b.yaml", "sft.yaml").command(*words, name="plan")


@refusals(Path(__file__).with_name("refusals.txt"), "cogvideox_5b sft")
def test_wrong_words(refusal: Refusal, capsys: pytest.CaptureFixture) -> None:
    assert_command_refused(capsys, plan_command(*refusal.words), refusal.line)


def test_a_tight_card_is_named(answer) -> None:
    """5B keeps a bf16 gradient of each of its 5,570.3 M trained numbers: 10.4 GiB."""
    step = plan_of("_5b", *CACHED).step_peak / GIB
    shown = {}
    for free in (1, 9, 12):  # GiB beside the peak
        text = answer(*plan_command("--gpu", str((step + free) / 0.96), *CACHED))
        shown[free] = "It is tight: gaps" in text
        assert not shown[free] or "up to 10.4 GiB more" in text
    assert shown == {1: True, 9: True, 12: False}


def test_without_a_gpu_the_peak_stands_alone(answer) -> None:
    assert "There is no GPU here to compare with; --gpu NAME" in answer(*plan_command())


def test_the_largest_step_counts_with_its_number_of_pictures() -> None:
    """A step of few pictures is below that of the clip; one of many is planned as a batch of pictures."""
    flat = ("data.params.max_num_frames=1", "args.batch_size=2000", "args.latent_cache=cache")
    both = "data.params.buckets=[[49,480,720],[1,480,720]]"
    size = lambda of: setup_of(of[0].run, 1)
    plain = size(config_of("_2b", CACHED[0]))
    few = size(config_of("_2b", CACHED[0], both, "data.params.bucket_batch=[1,11]"))
    assert (few.size, few.batch_size, few.shape) == (plain.size, 1, plain.shape)
    assert (few.encoders.shape, few.eval_shape) == (plain.encoders.shape, plain.eval_shape)
    many = size(config_of("_2b", CACHED[0], both, "data.params.bucket_batch=[1,2000]"))
    alone = size(config_of("_2b", *flat))
    # 13 latent frames of 30 x 45 tokens and a caption, or 1
    assert plain.shape == (1, 13 * 30 * 45 + 226) and many.shape == (2000, 30 * 45 + 226)
    assert (many.size, many.shape) == (alone.size, alone.shape)
    assert many.batch_bytes == alone.batch_bytes > plain.batch_bytes
    assert many.encoders.shape[1] == 49  # of the clip: pictures are encoded one by one
    args = ("args.eval_interval=5", "args.eval_batch_size=3")
    evaluated = size(config_of("_2b", CACHED[0], both, "data.params.bucket_batch=[1,2000]", *args))
    assert evaluated.eval_shape == (3 * 2000, 30 * 45 + 226)
    # Captions of pictures are encoded together.
    text = lambda *words: size(config_of("_2b", *words)).encoders.text_peak
    assert text(both, "data.params.bucket_batch=[1,11]") == 11 * text(both)
