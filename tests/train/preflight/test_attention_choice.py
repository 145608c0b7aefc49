"""args.attention_backend: names that are refused, what auto measures and chooses, what a checkpoint
stores."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from cogfast.__main__ import main
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.kernels import torch_library
from cogfast.kernels.attention_backends import (
    BACKENDS,
    Backend,
    backends_that_run,
    flash_attention_reference,
    reason_unavailable,
)
from cogfast.kernels.gpu import flash_attn
from cogfast.model.weights.checkpoint_manifest import read_manifest
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight import attention_choice
from cogfast.train.preflight.attention_choice import (
    Measured,
    check_attention,
    choose_for_training,
    fastest,
    measure,
    run_shape,
)
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS
from tests.support.refusals import assert_refused
from tests.support.runs import Run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (2, 150, 2, 16)


@pytest.fixture
def run(run: Run) -> Run:
    return run.with_args(train_iters=2)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100, without packages for attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    reason = "does not import: ModuleNotFoundError"
    monkeypatch.setattr(flash_attn, "load", lambda name: f"{BACKENDS[name].module} {reason}")
    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)


@pytest.fixture
def attend_by(monkeypatch: pytest.MonkeyPatch):
    """Replace what "flash" computes."""

    def replace(run) -> None:
        monkeypatch.setitem(BACKENDS, "flash", Backend(module="stand-in", is_for_cpu=True))
        monkeypatch.setattr(flash_attn, "load", lambda name: None)
        monkeypatch.setattr(flash_attn, "LOADED", {"flash"})
        monkeypatch.setattr(flash_attn, "attention_3", run)

    return replace


def test_the_key_takes_every_backend_and_auto() -> None:
    names = get_args(get_type_hints(TrainKeys)["attention_backend"])
    assert sorted(names) == sorted(["auto", *BACKENDS])


def test_the_fastest_is_that_of_the_least_sum() -> None:
    rows = [
        Measured("cudnn", 9.0, 20.0),
        Measured("fa3", 8.0, 25.0),
        Measured("fa4", 10.0, 18.5),
        Measured("flash", 1.0, 1.0, reason="dq is wrong"),
    ]
    assert fastest(rows) == "fa4"
    assert fastest(rows[:2]) == "cudnn"
    with pytest.raises(AssertionError, match=r"no attention backend runs: flash +out: dq is wrong"):
        fastest(rows[3:])


def off_by_one_percent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 1.01 * flash_attention_reference(q, k, v)


def without_half_of_dk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention_reference(q, (k + k.detach()) / 2, v)


def with_a_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def spoil(dv: Tensor) -> Tensor:
        dv = dv.clone()
        dv[0, 7, 1, 3] = torch.nan
        return dv

    v = v.clone()
    v.register_hook(spoil)
    return flash_attention_reference(q, k, v)


def breaking(*tensors: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: out of shared memory\nmore lines")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (off_by_one_percent, "out is wrong: relative error 1.0e-02, 1.0e-03 is"),
        (without_half_of_dk, "dk is wrong: relative error 5.0e-01"),
        (with_a_nan, "dv is wrong: relative error nan"),
        (breaking, "it fails: RuntimeError: CUDA error: out of shared memory"),
    ],
)
def test_a_wrong_backend_is_out(attend_by, wrong, reason: str) -> None:
    right = measure("flash", SHAPE, CPU, torch.float32)
    assert right.reason is None and right.forward_ms > 0 and right.backward_ms > 0
    attend_by(wrong)
    row = measure("flash", SHAPE, CPU, torch.float32)
    assert row.reason.startswith(reason) and "\n" not in row.reason


class Bench:
    """Replace the measurements on a GPU by a table of times, and record what was asked."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.asked = times, []

    def __call__(self, name: str, shape: tuple, device: torch.device, dtype: torch.dtype):
        self.asked.append((name, shape, dtype))
        if name not in self.times:
            reason = reason_unavailable(name, device, dtype, shape[-1])
            return Measured(name, reason=reason or "not there")
        return Measured(name, self.times[name], 2 * self.times[name])


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, h100: None, run: Run):
    """Call choose_for_training as on a machine with an H100, with a table of times."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def choose(times: dict[str, float], *arguments: str, stored: str | None = None):
        bench = Bench(times)
        monkeypatch.setattr(attention_choice, "measure", bench)
        config = run.config("args.bf16=true", *arguments)
        made = config.run
        args, model = made.args, made.network.config
        groups = ProcessGroups(0, 1, 0, GPU, None, False)
        return choose_for_training(made.data_arguments, args, model, groups, stored), bench

    return choose


def test_auto_measures_once_and_takes_the_fastest(on_gpu, log) -> None:
    name, bench = on_gpu({"cudnn": 3.0, "flash": 2.0, "efficient": 9.0})
    assert name == "flash"
    # 4 samples of 3 latent frames of 4 x 4 in patches of 2 x 2, and 8 text rows.
    shape = (4, 3 * 4 + 8, 2, 16)
    assert set(bench.asked) == {(n, shape, torch.bfloat16) for n in BACKENDS if n != "math"}
    for text in ("[4, 20, 2, 16] in bfloat16", "fa3        out: flash_attn_i", "taken: flash"):
        assert text in log.text
    lack = [line for line in log.messages if "flash-attn 3 and 4 are missing" in line]
    assert len(lack) == 1 and "0.76 to 0.78" in lack[0] and "pip install" in lack[0]
    log.clear()
    assert on_gpu({"cudnn": 3.0, "fa4": 2.0})[0] == "fa4"
    assert "are missing" not in log.text
    # math cannot be the fastest: it is measured where nothing else runs.
    assert on_gpu({"math": 70.0})[0] == "math"


def test_the_checkpoints_choice_is_kept_if_no_other_is_named(on_gpu, log) -> None:
    name, bench = on_gpu({"cudnn": 3.0, "flash": 2.0}, stored="cudnn")
    assert name == "cudnn" and bench.asked == []
    assert "attention: cudnn, as in the checkpoint" in log.text
    name, bench = on_gpu({"cudnn": 3.0}, "args.attention_backend=efficient", stored="cudnn")
    assert name == "efficient" and bench.asked == []
    assert "attention: efficient instead of the checkpoint's cudnn" in log.text


@pytest.mark.parametrize(
    ("stored", "reason"), [("fa3", "flash_attn_interface does not"), ("fa9", "unknown backend")]
)
def test_a_stored_choice_that_cannot_run_is_replaced(
    on_gpu, caplog, stored: str, reason: str
) -> None:
    name, bench = on_gpu({"cudnn": 3.0}, stored=stored)
    assert name == "cudnn" and bench.asked
    assert f"the checkpoint's {stored} cannot run here" in caplog.text and reason in caplog.text


def test_the_shape_is_that_of_the_runs_attention(run: Run, attend_by) -> None:
    """Attention gets this shape in a real step; the clips are half as high as the model's table."""
    seen = set()

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.add(tuple(q.shape))
        return flash_attention_reference(q, k, v)

    attend_by(spy)
    size = "data.params.video_size=[16, 32]"
    trainer = run.train("args.attention_backend=flash", size, steps=1).last
    wanted = run_shape(
        trainer.config.run.data_arguments, trainer.args, trainer.engine.transformer.config
    )
    assert seen == {wanted} and wanted[1] == 3 * 1 * 2 + 8


def test_a_run_keeps_its_choice_and_a_resumed_one_takes_it(
    run: Run, tmp_path: Path, log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    """math and flash round differently, so a run that changed its backend would show it."""
    asked = "args.attention_backend=math"
    whole = run.into(tmp_path / "whole").train(asked, steps=4)
    cut = run.train(asked)
    assert read_manifest(cut.checkpoint)["attention_backend"] == "math"
    resumed = run.resume(steps=4)
    assert resumed.last.parts.model.attention_backend == "math"
    assert "attention: math, as in the checkpoint" in log.text
    assert resumed.losses == whole.losses
    # Sampling keeps it, too.
    given = ["--prompt", "a bar", "args.only_save_latents=true", "--out", str(tmp_path / "samples")]
    assert main(["sample", str(cut.path), *given]) == 0
    assert "attention: math, as in the checkpoint" in capsys.readouterr().err


@NEEDS_CPU_KERNELS
def test_a_run_on_a_cpu_stores_the_choice_of_all_ranks(run: Run, monkeypatch) -> None:
    trained = run.train(steps=1)
    assert read_manifest(trained.checkpoint)["attention_backend"] == "cogfast"
    config = run.config()
    args = config.run.args
    both = SimpleNamespace(device=torch.device("cpu"), gather=lambda name: [name, None])
    model = trained.last.engine.transformer.config
    # Another machine has no library.
    assert choose_for_training({}, args, model, both, stored=None) == "flash"
    own = args.changed(kernels="torch")
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda name: [name])
    for stored in (None, "cogfast"):
        assert choose_for_training({}, own, model, alone, stored) is None
    assert choose_for_training({}, own, model, alone, "math") == "math"
    named = own.changed(attention_backend="cogfast")
    line = (
        "it is a kernel of cogfast, and args.kernels=torch leaves these out; this machine can run"
    )
    with pytest.raises(ValueError, match=line):
        check_attention(named, 64)


@NEEDS_CPU_KERNELS
def test_a_named_kernel_is_compiled_at_the_start(run: Run, monkeypatch) -> None:
    """On a machine where nothing has run yet, as for auto."""
    config = run.config("args.attention_backend=cogfast")
    monkeypatch.setattr(torch_library, "HAS_CPU_KERNELS", False)
    check_attention(config.run.args, 64)
    assert torch_library.HAS_CPU_KERNELS


def test_a_name_that_cannot_run_says_what_can(run: Run) -> None:
    config = run.config("args.attention_backend=cudnn")
    names = ["auto", *backends_that_run(torch.device("cpu"), torch.float32, 64)]
    assert {"flash", "math"} < {*names}
    reason = f"it needs a CUDA GPU; this machine can run: {', '.join(names)}"
    line = f"args.attention_backend=cudnn: {reason}$"
    assert_refused(lambda: check_attention(config.run.args, 64), line)


def test_a_deterministic_run_may_not_name_cudnn(
    run: Run, h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before torch is set to be deterministic and before any GPU work."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = run.with_words("args.attention_backend=cudnn", "args.bf16=true")
    config = run.config()
    check_attention(config.run.args, 64)
    exact = run.config("args.deterministic=true")
    line = (
        "args.attention_backend=cudnn: its gradients do not repeat bit for bit, as deterministic "
        "runs must; this machine can run: auto, flash, efficient, math$"
    )
    assert_refused(lambda: check_attention(exact.run.args, 64), line)
