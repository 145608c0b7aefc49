"""Runs with a planted fault: `torchrun ... tests/support/ranks/nonfinite_ranks.py BASE FOLDER
'{NAME: [FAULT, WORD, ...], ...}'`. FOLDER/NAME gets the run, FOLDER/NAME.txt the error of rank 0.

The last rank alone has the fault: an element of its part of a weight, or "error", which is one of its
second pass.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from cogfast.distributed.process_groups import start_processes
from cogfast.train.trainer import Trainer
from cogfast.train.watchers.parameter_checks import own_values
from tests.support.runs import run_of


class Overflows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * math.inf


def plant(trainer: Trainer, fault: str) -> None:
    if fault == "error":
        trainer._loss_at = no_memory
    elif fault != "none":
        own_values(trainer.engine.transformer.get_parameter(fault))[-1] = math.inf


def no_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("no memory")


def main() -> None:
    base, folder, runs = sys.argv[1:]
    groups = start_processes()
    for name, (fault, *words) in json.loads(runs).items():
        run = f"args.run_folder={Path(folder) / name}"
        trainer = run_of(base).by(Trainer, "tests").trainer(run, *words)
        if groups.rank == groups.world_size - 1:
            plant(trainer, fault)
        text = ""
        try:
            trainer.train()
        except RuntimeError as error:
            text = str(error)
        if groups.is_main:
            (Path(folder) / f"{name}.txt").write_text(text)
    groups.close()


if __name__ == "__main__":
    main()
