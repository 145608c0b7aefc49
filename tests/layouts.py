"""Several runs in one launch: `torchrun ... tests/layouts.py BASE SAVE WORD,WORD ...`.

Each argument is a run with these overrides; it is saved below SAVE/<number of the run>.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cogfast.config import load_config
from cogfast.train.process_groups import start_processes
from cogfast.train.trainer import Trainer


def main() -> None:
    base, save, *runs = sys.argv[1:]
    groups = start_processes()
    for number, words in enumerate(runs):
        overrides = [word for word in words.split(",") if word]
        Trainer(load_config([base], [f"args.save={Path(save) / str(number)}", *overrides])).train()
    groups.close()


if __name__ == "__main__":
    main()
