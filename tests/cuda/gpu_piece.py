"""Run bench.gpu_run where nothing is computed: python -m tests.cuda.gpu_piece PIECE --out FOLDER ...

Results are compared as on a GPU, but what the comparisons find is dropped, because it would keep a piece
from timing what it compared.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import bench.kernel_ops.op_bench
import bench.steps.step_cases
from bench import gpu_run
from bench.kernel_ops.optimizer_ops import OptimizerBench


def without_problems(compare: Callable) -> Callable:
    """Drop the problems that `compare` returns, alone or after figures."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = compare(*args, **kwargs)
        return (found[0], []) if isinstance(found, tuple) else []

    return wrapped


COMPARISONS = (
    (bench.kernel_ops.op_bench, "compare", without_problems),
    (OptimizerBench, "_compare", without_problems),
    (bench.steps.step_cases, "compare_sides", without_problems),
)


if __name__ == "__main__":
    for owner, name, change in COMPARISONS:
        patch.object(owner, name, change(getattr(owner, name))).start()
    sys.exit(gpu_run.main())
