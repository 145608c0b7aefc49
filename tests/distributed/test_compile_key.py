"""args.kernels and args.compile: training gives the same numbers on each choice; what each needs
installed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file

from cogfast.train.preflight import compilers
from cogfast.train.preflight.check import check_sample, check_train
from tests.support.refusals import assert_refused
from tests.support.runs import Run

TORCH = "args.kernels=torch"


def numbers(run: Run) -> list[float]:
    """The numbers of every line of metrics.jsonl, in order."""
    keys = ("loss", "grad_norm", "valid_loss", "valid_loss_band_0", "valid_loss_band_3")
    found = [line[key] for line in run.lines for key in keys if key in line]
    assert len(found) == 4 * 2 + 2 * 3
    return found


def names(run: Run) -> list[str]:
    return [name for name, _ in run.last.engine.transformer.named_parameters()]


def sampled(run: Run) -> torch.Tensor:
    """Return the latents of the last evaluation."""
    (file,) = (run.path / "samples" / "step-00000004").glob("*.safetensors")
    (latents,) = load_file(file).values()
    return latents


@pytest.mark.slow  # Inductor compiles C++
@torch._dynamo.config.patch(recompile_limit=1)  # a run raises the limit
@pytest.mark.soak
def test_training_is_the_same_on_every_choice(run: Run, tmp_path: Path) -> None:
    """Compare losses, gradient norms, held-out losses and samples of one run, three ways.

    The compiled run recomputes activations and, while it evaluates, meets another batch size, one
    sample beside its guidance copy, and no gradients.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    run = run.with_args(
        valid_data=[str(run.data)],
        eval_interval=2,
        eval_batch_size=3,
        eval_prompts=["a bar"],
        only_log_video_latents=True,
    )
    triton = run.into(tmp_path / "triton").train()
    for choice, args in {
        "torch": {"kernels": "torch"},
        "compiled": {"compile": True, "checkpoint_activations": True},
    }.items():
        other = run.with_args(**args).into(tmp_path / choice).train()
        assert numbers(other) == pytest.approx(numbers(triton), rel=1e-6), choice
        assert names(other) == names(triton)
        difference = (sampled(other) - sampled(triton)).abs().max()
        assert difference < 1e-5, choice
        assert (counters["unique_graphs"] > 1) == (choice == "compiled")


def test_compiling_is_off_by_default_and_kernels_are_chosen(run: Run) -> None:
    for arguments, gelu in (([], "gelu"), ([TORCH], "gelu_reference")):
        trainer = run.trainer(*arguments)
        blocks = trainer.engine.transformer.blocks
        assert all(block._compiled_call_impl is None for block in blocks)
        assert {block.kernels.gelu.__name__ for block in blocks} == {gelu}
        assert {block.attention.kernels.gelu.__name__ for block in blocks} == {gelu}
        assert trainer.engine.optimizer.kernels == ("torch" if arguments else "triton")


@pytest.fixture
def check(run: Run) -> Callable[..., None]:
    return lambda *words: check_train(run.config(*words).run)


def only(*programs: str):
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def test_compiling_on_a_cpu_needs_a_compiler_and_headers(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers.sys, "platform", "linux")
    monkeypatch.setattr(compilers.shutil, "which", only("gcc"))
    check()  # kernels=triton runs PyTorch on a CPU
    line = "^command line: args.compile=true needs a compiler, but there is no g++; <...>CXX"
    assert_refused(lambda: check("args.compile=true"), line)
    monkeypatch.setattr(compilers.shutil, "which", only("g++"))
    check("args.compile=true")
    monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": "nowhere"})
    line = "needs Python's headers, but nowhere/Python.h does not"
    assert_refused(lambda: check("args.compile=true"), line)


@pytest.mark.parametrize(
    ("compiler", "has_triton", "words", "message"),
    [
        ("clang", True, [], None),
        (None, True, [], "args.kernels=triton needs a compiler, but there is no gcc"),
        (None, True, [TORCH], None),
        ("gcc", False, [], "args.kernels=triton needs Triton<...>args.kernels=torch"),
        ("gcc", False, [TORCH, "args.compile=true"], "needs Triton<...>compile=false"),
    ],
)
def test_triton_on_a_gpu_needs_a_compiler(
    check, monkeypatch, compiler: str | None, has_triton: bool, words: list, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilers.shutil, "which", only(*[compiler] * (compiler is not None)))
    monkeypatch.setattr(compilers, "find_spec", lambda name: "found" if has_triton else None)
    if message is None:
        check(*words)
    else:
        assert_refused(lambda: check(*words), message)


def test_compile_refuses_zero_3(run: Run, check: Callable[..., None]) -> None:
    stage_3 = "deepspeed.zero_optimization.stage=3"
    line = "args.compile=true does not support ZeRO-3"
    assert_refused(lambda: check("args.compile=true", stage_3), line)
    check(stage_3)
    words = ("args.compile=true", stage_3, "args.force_inference=true")
    check_sample(run.config(*words).run)  # samples without ZeRO
