"""The comparison on a CPU: the floor has the products of the model, and every ratio its meaning."""

import json
import time
from collections import Counter
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.steps import cpu_peers, diffusers_kernels
from bench.steps.cpu_peers import Floor
from bench.steps.step_models import MODELS, Variant, draw_batch
from bench.steps.step_sides import Ours
from cogfast.kernels.block_kernels import choose_kernels
from tests.support.kernels.cpu_kernels import threads

CPU = torch.device("cpu")


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("model", ["5b-smallest", "quickstart"])
def test_the_floor_has_the_products_of_the_model(model: str) -> None:
    """Only the embeddings of the timestep and the last modulation are missing: below 1%."""
    config, batch_size = MODELS[model]
    variant = Variant(config, batch_size, torch.float32, CPU)
    batch, ours, floor = draw_batch(variant), Ours(variant), Floor(variant)
    # PyTorch counts the operations of its own attention alone.
    ours.network.use_kernels(choose_kernels("triton", "flash"))
    floor.backend = "flash"
    whole = flops(lambda: ours.forward(batch).square().mean().backward())
    part = flops(lambda: floor(batch).backward())
    assert 0.98 * whole < part <= whole


def test_ratios_are_medians_over_rounds() -> None:
    """Rounds in which all contenders take longer leave the ratios as they are."""
    milliseconds = dict(zip(cpu_peers.CONTENDERS, (20, 40, 30, 5), strict=True))
    times = {name: [ms, 3 * ms, 2 * ms] for name, ms in milliseconds.items()}
    row = cpu_peers.PEERS.summarize(times)
    assert row["ours median_ms"] == 40
    assert row["speed-up over diffusers"] == 2
    assert row["over compiled diffusers"] == 1.5


def test_every_contender_runs_in_every_round(monkeypatch, tmp_path) -> None:
    calls: Counter[str] = Counter()
    monkeypatch.setattr(cpu_peers, "make_step", lambda name, variant: lambda: calls.update([name]))
    out = tmp_path / "peers.json"
    arguments = f"--model tiny --dtype float32 --threads 1 --rounds 4 --out {out}"
    with threads(1):  # main sets the number of threads
        assert cpu_peers.PEERS.main("", ["bfloat16"], arguments.split()) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert {row[f"{name} num_samples"] for name in cpu_peers.CONTENDERS} == {4}
    assert set(calls) == set(cpu_peers.CONTENDERS) and len(set(calls.values())) == 1


@pytest.mark.parametrize("command", [cpu_peers.PEERS, diffusers_kernels.KERNELS])
def test_the_command(command: cpu_peers.Comparison, monkeypatch, tmp_path) -> None:
    """Inductor, which compiles C++, is a soak."""
    compile_ = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    config, batch_size = MODELS["5b-smallest"]
    monkeypatch.setitem(MODELS, "5b-smallest", (replace(config, num_layers=1), batch_size))
    out = tmp_path / "rows.json"
    arguments = f"--model 5b-smallest --dtype float32 --threads 1 --rounds 2 --out {out}"
    with threads(1):
        assert command.main("", ["float32"], arguments.split()) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert all(row[f"{name} num_samples"] == 2 for name in command.contenders)
    assert all(row[key] > 0 for key in command.ratios)


@pytest.mark.soak  # Inductor compiles C++
def test_all_contenders_run() -> None:
    row = cpu_peers.PEERS.measure("5b-smallest", torch.float32, threads=1, rounds=2)
    assert all(row[f"{name} num_samples"] == 2 for name in cpu_peers.CONTENDERS)


def test_rows_of_diffusers_kernels(monkeypatch, tmp_path) -> None:
    """All contenders run equally often; a ratio is diffusers' time over a contender's in the same round."""
    seconds = dict(
        zip(diffusers_kernels.CONTENDERS, (0.02, 0.005, 0.01, 0.005, 0.002), strict=True)
    )
    calls: Counter[str] = Counter()
    pretend = lambda name, _: lambda: calls.update([name]) or time.sleep(seconds[name])
    monkeypatch.setattr(diffusers_kernels, "make_call", pretend)
    monkeypatch.setattr(cpu_peers, "take_turns", recorded := Recorded(cpu_peers.take_turns))
    out = tmp_path / "rows.json"
    arguments = f"--model tiny --dtype float32 --threads 1 --rounds 5 --out {out}"
    with threads(1):
        assert diffusers_kernels.KERNELS.main("", ["bfloat16"], arguments.split()) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert len(set(calls.values())) == 1 and calls.keys() == seconds.keys()
    assert (row["num_tokens"], row["num_layers"], row["threads"]) == (1000, 6, 1)
    for name in diffusers_kernels.CONTENDERS[1:]:
        pairs = zip(recorded.times["diffusers"], recorded.times[name], strict=True)
        assert row[f"{name} ratio"] == sorted(a / b for a, b in pairs)[2]


class Recorded:
    def __init__(self, take_turns):
        self.take_turns = take_turns

    def __call__(self, *arguments):
        self.times = self.take_turns(*arguments)
        return self.times
