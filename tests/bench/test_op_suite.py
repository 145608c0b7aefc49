"""`pytest bench --benchmark-only` at small sizes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from bench.harness.outcome import Settings
from bench.kernel_ops import op_bench, optimizer_ops
from bench.kernel_ops.op_cases import NORM, TINY_SHAPES, draw_inputs
from tests.support.tiny_run import ROOT

CPU = torch.device("cpu")
QUICK = ("--benchmark-min-rounds=1", "--benchmark-max-time=0.001")
TINY = ("bench", "--benchmark-only", "--device", "cpu", "--tiny")
# Halves the gradient of cogfast's gelu.
PLUGIN = """
from cogfast.kernels import gelu
right = gelu.gelu
def wrong(*inputs, **named):
    y = right(*inputs, **named)
    return y / 2 + y.detach() / 2
gelu.gelu = wrong
"""


def suite(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", *TINY, *QUICK, *words]
    # Within pytest-xdist the plugin would time nothing.
    kept = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)


def test_the_suite_groups_times_by_op_and_shape_and_compares_with_kept_ones(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    chosen = ("-k", "gelu and 5B and bfloat16 or quickstart-100_tensors")
    done = suite(*chosen, f"--benchmark-json={kept}")
    assert done.returncode == 0, done.stdout
    groups: dict[str, dict[str, dict]] = {}
    for figure in json.loads(kept.read_text())["benchmarks"]:
        groups.setdefault(figure["group"], {})[figure["name"]] = figure
    of_gelu = [f"gelu, 5B 1x33x3x64, bfloat16, {way}" for way in ("forward", "backward")]
    update = "FusedEmaAdam clip, quickstart, 100 tensors, float32, step"
    assert groups.keys() == {*of_gelu, update}
    peers = ["cogfast", "torch eager", "torch.compile"]
    assert [sorted(groups[name]) for name in of_gelu] == [peers, peers]
    assert sorted(groups[update]) == sorted([*peers, "AdamW(fused) + lerp"])
    for figure in groups[of_gelu[0]].values():
        assert (
            figure["extra_info"]["bytes"] == 8 * 33 * 3 * 64 * 2 and figure["stats"]["median"] > 0
        )
    again = suite("-k", "gelu and 5B and bfloat16-forward", f"--benchmark-compare={kept}")
    assert again.returncode == 0 and "cogfast (NOW)" in again.stdout


def test_a_wrong_op_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_gelu.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = suite("-k", "gelu and 5B and float32 and cogfast", "-p", "half_gelu")
    assert done.returncode == 1 and "d_x: relative error" in done.stdout
    assert "2 failed" in done.stdout and "benchmark 'gelu" not in done.stdout


def test_apex_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that compute what apex documents; apex itself needs a GPU."""
    names = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm", "apex.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[2]].fused_layer_norm_affine = lambda x, weight, bias, shape, eps: F.layer_norm(
        x, shape, weight, bias, eps
    )
    modules[names[3]].FusedAdam = torch.optim.AdamW
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for shape in TINY_SHAPES:
        inputs = draw_inputs(NORM, shape, torch.float32, CPU)
        for found, wanted in zip(
            NORM.apex(shape, inputs), NORM.reference(shape, inputs), strict=True
        ):
            torch.testing.assert_close(found, wanted)
    for module in (op_bench, optimizer_ops):
        monkeypatch.setattr(module, "has_apex", lambda device: True)
    settings = Settings(CPU, is_tiny=True)
    assert op_bench.OpBench(settings, NORM, TINY_SHAPES[0]).peers[-1] == "apex"
    update = optimizer_ops.optimizer_benches(settings)[2]
    assert update.peers[-1] == "apex FusedAdam + lerp"
    update.calls(update.peers[-1])["step"][0]()
