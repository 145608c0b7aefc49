"""args.kernels and args.compile: training gives the same numbers on each choice; what each needs
installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file

from cogfast.config import load_config
from cogfast.train.preflight import compilers
from cogfast.train.preflight.check import check_sample, check_train
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import run_folder, write_config


def train(folder: Path, data: Path, **args: object) -> tuple[list[float], list[str]]:
    """Train; return the numbers of every line of metrics.jsonl, in order, and the parameters'
    names."""
    base = write_config(
        folder / "base.yaml",
        data,
        train_iters=4,
        valid_data=[str(data)],
        eval_interval=2,
        eval_batch_size=3,
        eval_prompts=["a bar"],
        only_log_video_latents=True,
        **args,
    )
    trainer = Trainer(load_config([base], []))
    trainer.train()
    lines = (run_folder(folder / "runs") / "metrics.jsonl").read_text().splitlines()
    keys = ("loss", "grad_norm", "valid_loss", "valid_loss_band_0", "valid_loss_band_3")
    numbers = [line[key] for line in map(json.loads, lines) for key in keys if key in line]
    assert len(numbers) == 4 * 2 + 2 * 3
    return numbers, [name for name, _ in trainer.engine.transformer.named_parameters()]


def sampled(folder: Path) -> torch.Tensor:
    """Return the latents of the last evaluation."""
    (file,) = (run_folder(folder / "runs") / "samples" / "step-00000004").glob("*.safetensors")
    (latents,) = load_file(file).values()
    return latents


@pytest.mark.slow  # Inductor compiles C++
@torch._dynamo.config.patch(recompile_limit=1)  # a run raises the limit
@pytest.mark.soak
def test_training_is_the_same_on_every_choice(tmp_path: Path, data: Path) -> None:
    """Compare losses, gradient norms, held-out losses and samples of one run, three ways.

    The compiled run recomputes activations and, while it evaluates, meets another batch size, one
    sample beside its guidance copy, and no gradients.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    wanted, names = train(tmp_path / "triton", data)
    for choice, args in {
        "torch": {"kernels": "torch"},
        "compiled": {"compile": True, "checkpoint_activations": True},
    }.items():
        found, found_names = train(tmp_path / choice, data, **args)
        assert found == pytest.approx(wanted, rel=1e-6), choice
        assert found_names == names
        difference = (sampled(tmp_path / choice) - sampled(tmp_path / "triton")).abs().max()
        assert difference < 1e-5, choice
        assert (counters["unique_graphs"] > 1) == (choice == "compiled")


def test_compiling_is_off_by_default_and_kernels_are_chosen(tmp_path: Path, data: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data)
    for arguments, gelu in (([], "gelu"), (["args.kernels=torch"], "gelu_reference")):
        trainer = Trainer(load_config([base], arguments))
        blocks = trainer.engine.transformer.blocks
        assert all(block._compiled_call_impl is None for block in blocks)
        assert {block.kernels.gelu.__name__ for block in blocks} == {gelu}
        assert {block.attention.kernels.gelu.__name__ for block in blocks} == {gelu}
        assert trainer.engine.optimizer.kernels == ("torch" if arguments else "triton")


def check(base: Path, *arguments: str) -> None:
    check_train(load_config([base], arguments))


@pytest.fixture
def base(tmp_path: Path, data: Path) -> Path:
    return write_config(tmp_path / "base.yaml", data)


def only(*programs: str):
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def test_compiling_on_a_cpu_needs_a_compiler_and_headers(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers.sys, "platform", "linux")
    monkeypatch.setattr(compilers.shutil, "which", only("gcc"))
    check(base)  # kernels=triton runs PyTorch on a CPU
    text = r"^command line: args.compile=true needs a compiler, but there is no g\+\+; .*CXX"
    with pytest.raises(ValueError, match=text):
        check(base, "args.compile=true")
    monkeypatch.setattr(compilers.shutil, "which", only("g++"))
    check(base, "args.compile=true")
    monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": "nowhere"})
    with pytest.raises(ValueError, match="needs Python's headers, but nowhere/Python.h does not"):
        check(base, "args.compile=true")


@pytest.mark.parametrize(
    ("compiler", "has_triton", "words", "message"),
    [
        ("clang", True, [], None),
        (None, True, [], "args.kernels=triton needs a compiler, but there is no gcc"),
        (None, True, ["args.kernels=torch"], None),
        ("gcc", False, [], "args.kernels=triton needs Triton.*args.kernels=torch"),
        ("gcc", False, ["args.kernels=torch", "args.compile=true"], "needs Triton.*compile=false"),
    ],
)
def test_triton_on_a_gpu_needs_a_compiler(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str | None,
    has_triton: bool,
    words: list[str],
    message: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilers.shutil, "which", only(*[compiler] * (compiler is not None)))
    monkeypatch.setattr(compilers, "find_spec", lambda name: "found" if has_triton else None)
    if message is None:
        check(base, *words)
    else:
        with pytest.raises(ValueError, match=message):
            check(base, *words)


def test_compile_and_kernels_refuse_what_they_do_not_support(base: Path) -> None:
    stage_3 = "deepspeed.zero_optimization.stage=3"
    with pytest.raises(ValueError, match="args.compile=true does not support ZeRO-3"):
        check(base, "args.compile=true", stage_3)
    check(base, stage_3)
    arguments = ["args.compile=true", stage_3, "args.force_inference=true"]
    check_sample(load_config([base], arguments))  # samples without ZeRO
    with pytest.raises(ValueError, match="args.kernels='cuda' must be one of triton, torch"):
        check(base, "args.kernels=cuda")
