"""The cases of `pytest bench --benchmark-only`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.harness.outcome import Settings
from bench.kernel_ops.op_bench import OURS, OpBench
from bench.kernel_ops.op_cases import CPU_SHAPES, OPS, SHAPES, TINY_SHAPES
from bench.kernel_ops.optimizer_ops import optimizer_benches


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.addoption("--tiny", action="store_true", help="small sizes, to test the suite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(metafunc.config.getoption("--device") or found)
        cases = list(_cases(Settings(device, bool(metafunc.config.getoption("--tiny")))))
        metafunc.parametrize(("bench", "way", "name"), cases)


def _cases(settings: Settings) -> Iterator:
    is_cpu = settings.device.type == "cpu"
    shapes = TINY_SHAPES if settings.is_tiny else CPU_SHAPES if is_cpu else SHAPES
    dtypes = (torch.float32, torch.bfloat16) if is_cpu else (torch.bfloat16,)
    of_blocks = [OpBench(settings, op, s, dtype) for op in OPS for s in shapes for dtype in dtypes]
    for bench in (*of_blocks, *optimizer_benches(settings)):
        for way in bench.ways:
            for name in (OURS, *bench.peers):
                words = (str(bench), str(bench.dtype).removeprefix("torch."), way, name)
                yield pytest.param(
                    bench, way, name, id="-".join(words).replace(", ", "-").replace(" ", "_")
                )
