"""Starts leave out packages that they do not use.

Nothing here measures time. Each package named takes 0.2 s to 4 s of a start.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT, write_clips, write_config

# For torch.compile, for sharded tensors and for other text encoders and first stages.
NEVER = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "networkx"}
NEVER |= {"transformers", "diffusers", "scipy", "matplotlib"}
# The first launch of a kernel imports Triton, and so does DeepSpeed. DeepSpeed's models check its
# section of a configuration; ops on the meta device, by which a plan traces the network, import sympy.
UNUSED = {
    "dry run": NEVER | {"triton", "tensorboard", "av", "safetensors"},
    "sample": NEVER | {"triton", "tensorboard"},
    "plan": NEVER - {"sympy"} | {"tensorboard"},
    "train": NEVER - {"sympy"},
}

START = """
import json, sys
from cogfast.__main__ import main

base, out, found = sys.argv[1], sys.argv[2], {}
assert main(["train", "--base", base, "--dry-run"]) == 0
found["dry run"] = sorted(sys.modules)
words = ["--prompt", "a bar", "--out", out, "args.force_inference=true"]
assert main(["sample", "--base", base, *words]) == 0
found["sample"] = sorted(sys.modules)
words = ["--gpu", "h100-80", "--gpus", "4", "args.activation_checkpointing=attention_kept"]
assert main(["plan", "--base", base, *words]) == 0
found["plan"] = sorted(sys.modules)

from cogfast.train.watchers.metrics import Metrics

log = Metrics._log

def log_and_look(*values):  # after the first step
    found["train"] = sorted(sys.modules)
    return log(*values)

Metrics._log = log_and_look
words = ["args.train_iters=1", "args.activation_checkpointing=attention_kept"]
assert main(["train", "--base", base, *words]) == 0
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The modules after each command in one process."""
    folder = tmp_path_factory.mktemp("start")
    base = write_config(folder / "base.yaml", write_clips(folder / "data", num_clips=4))
    # Triton's interpreter, which other tests use, is no part of a start.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", START, str(base), str(folder / "samples")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", UNUSED)
def test_a_start_imports_only_what_it_uses(found: dict, command: str) -> None:
    assert not UNUSED[command] & set(found[command])
    assert "torch" in found[command]


PLANTED = "import pathlib; pathlib.Path(__file__ + '.was_imported').touch(); raise ImportError"
# Starts a process as a GPU's data workers are: not by a fork.
SPAWN = """
import multiprocessing, os, sys
from cogfast.__main__ import main

sys.argv = ["cogfast", "--help"]
if __name__ == "__main__":
    assert main() == 0
    process = multiprocessing.get_context("spawn").Process(target=os.getcwd)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("start", ["module", "spawned"])
def test_nothing_is_imported_from_the_current_folder(start: str, tmp_path: Path) -> None:
    """It may be a downloaded folder. torch imports dill and pynvml where it finds them."""
    script = tmp_path / "start.py"
    script.write_text(SPAWN)
    base = write_config(tmp_path / "base.yaml", tmp_path / "data")
    words = ["-m", "cogfast", "train", "--base", base, "--dry-run"]
    current = tmp_path / "downloaded"
    current.mkdir()
    # torch, the command and multiprocessing import them.
    for name in ("dill", "pynvml", "traceback", "argparse", "socket", "yaml"):
        (current / f"{name}.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, *(words if start == "module" else [script])],
        cwd=current,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not list(current.glob("*was_imported"))
