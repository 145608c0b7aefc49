"""Several runs of one launch: `torchrun ... tests/support/layouts.py '[[BASE, WORD, ...], ...]'`.

Each is a run of the YAML file BASE with these overrides. ["copy", SAVE, STEP, RUN] makes a run folder
that has the checkpoint of STEP of the only run below SAVE, and no other.

The result of a gather of weights is stored only when it is waited for, so that code that does not
wait reads the old weights. Only the training loop's thread may read parameters of modules: under
ZeRO-3 that can be a collective.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch.distributed as dist
from torch import nn

from cogfast.config import load_config
from cogfast.distributed.process_groups import start_processes
from cogfast.train.trainer import Trainer
from tests.distributed.test_fused_step import gather_late
from tests.support.tiny_run import run_folder

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
            Trainer(load_config([first], arguments)).train()
    groups.close()


if __name__ == "__main__":
    dist.all_gather_into_tensor = gather_late
    nn.Module.__getattr__ = read_on_loop
    train(json.loads(sys.argv[1]))
