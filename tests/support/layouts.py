"""Several runs of one launch: `torchrun ... tests/support/layouts.py '[[BASE, WORD, ...], ...]'`.

Each is a run of the YAML file BASE with these overrides. ["copy", SAVE, STEP, RUN] makes a run folder
that has the checkpoint of STEP of the only run below SAVE, and no other.

The result of a gather of weights is stored only when it is waited for, so that code that does not
wait reads the old weights. Only the training loop's thread may read parameters of modules: under
ZeRO-3 that can be a collective.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.distributed.process_groups import start_processes
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint
from cogfast.train.trainer import Trainer
from tests.distributed.test_fused_step import gather_late
from tests.support.runs import Run, run_of
from tests.support.tiny_run import launch_ranks, read_run_weights, run_folder

_read = nn.Module.__getattr__


def read_on_loop(module: nn.Module, name: str) -> object:
    thread = threading.current_thread()
    # autograd's threads have no name of their own.
    assert not thread.name.startswith("checkpoint") or name not in module._parameters, name
    return _read(module, name)


def copy_run(save: str, step: str, run: str) -> None:
    source = run_folder(Path(save)) / "checkpoints" / step
    target = Path(run) / "checkpoints" / step
    target.mkdir(parents=True)
    for file in source.iterdir():
        os.link(file, target / file.name)
    (target.parent / "latest").write_text(step)


def train(steps: list[list[str]]) -> None:
    groups = start_processes()
    for first, *arguments in steps:
        if first == "copy":
            groups.on_main(lambda names=arguments: copy_run(*names))
        else:
            run_of(first).by(Trainer, "tests").train(*arguments)
    groups.close()


def launch(ranks: int, steps: Sequence[Run | list[str]]) -> None:
    """Run the steps on so many ranks: one is this process."""
    words = [[str(s.base), *s.words] if isinstance(s, Run) else s for s in steps]
    if ranks == 1:
        train(words)
    else:
        launch_ranks(ranks, "tests/support/layouts.py", json.dumps(words))


def numbers(run: Path, key: str) -> Tensor:
    """Return a number of each line of metrics.jsonl that has it."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([line[key] for line in lines if key in line], dtype=torch.float64)


def weights(run: Path, ema: bool) -> dict[str, Tensor]:
    """Return the whole weights, or their EMA, of a run's last checkpoint."""
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    return read_run_weights(checkpoint, ema)


def assert_equal_training(found: Path, one: Path, first: int = 0, free: str | None = None) -> None:
    """Compare losses, norms before clipping, weights and EMA of a run with those of one process.

    first: the step at which the run resumed. free: the end of names of weights without a gradient.
    """
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        wanted = numbers(one, key)
        assert wanted[-1] != wanted[0]
        torch.testing.assert_close(numbers(found, key), wanted[first:], rtol=tolerance, atol=0)
    for ema in (False, True):
        expected, got = weights(one, ema), weights(found, ema)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            # Adam turns the rounding of a gradient near zero into a step of its own.
            limit = 1e-4 * value.norm().clamp(min=1e-2)
            is_free = free is not None and name.endswith(free)
            assert is_free or (got[name] - value).norm() <= limit, name


if __name__ == "__main__":
    dist.all_gather_into_tensor = gather_late
    nn.Module.__getattr__ = read_on_loop
    train(json.loads(sys.argv[1]))
