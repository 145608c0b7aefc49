"""Several samplings in one launch: `torchrun ... tests/support/ranks/sample_ranks.py '[[WORD, ...], ...]'`, each
with the arguments of a `cogfast sample`."""

import json
import sys

from cogfast.__main__ import main
from cogfast.distributed.process_groups import start_processes


def sample_all(lists: list[list[str]]) -> None:
    groups = start_processes()
    for arguments in lists:
        assert main(["sample", *arguments]) == 0, arguments
    groups.close()


if __name__ == "__main__":
    sample_all(json.loads(sys.argv[1]))
