"""Imports of a run and of the scripts in this folder, for the server that forks ranks."""

import gc

import deepspeed.ops
import pytest  # noqa: F401  # multiprocessing imports the main module in each rank

import tests.support.ranks.tensor_parallel_cases
import tests.support.tiny_run  # noqa: F401
from cogfast.extensions.sample import command  # noqa: F401
from tests.cli.hostile.forked_case import preload

preload()
assert deepspeed.ops.__compatible_ops__  # DeepSpeed probes each op when it is first asked
gc.freeze()  # collections leave the imported objects in the memory that ranks share
