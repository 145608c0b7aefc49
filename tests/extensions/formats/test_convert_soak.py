"""How much memory a conversion takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT

pytestmark = pytest.mark.soak

# A 2B of fewer layers, 1.5 GB in float32, whose largest tensor is the fixed table: 130 MiB.
MAKE = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from cogfast.model.transformer import assemble_transformer
from cogfast.model.config import TransformerConfig
from cogfast.extensions.formats.sat import write_sat
from cogfast.model.weights.source import WeightSource
from cogfast.config.sat_network import transformer_arguments
from tests.support.runs import run_of

section = run_of(sys.argv[1]).config().model["network_config"]["params"]
config = replace(TransformerConfig(**transformer_arguments(section)), num_layers=6)
with torch.device("meta"):
    model = assemble_transformer(config)
shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n != "position_table.weight"}
made = lambda name, shard: torch.randn(shapes[name])
source = WeightSource("random", shapes, made, dict.fromkeys(shapes, torch.float32))
write_sat(source, config, Path(sys.argv[2]))
"""
# RssAnon of /proc/self/status, in kB: memory that no file backs.
CONVERT = """
import json, sys, threading, time
from pathlib import Path
from cogfast.extensions.formats.convert import convert

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])

peak, is_done = 0, threading.Event()
def watch():
    global peak
    while not is_done.wait(0.005):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
try:
    convert(*sys.argv[1:4], **json.loads(sys.argv[4]))
finally:
    is_done.set()
    thread.join()
print(peak)
"""
MOST = (2 * 130 << 10) + (1 << 20)  # kB: twice the largest tensor and 1 GiB


def python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model larger than the bound is converted to diffusers' format and back."""
    python(MAKE, ROOT / "configs" / "cogvideox_2b.yaml", tmp_path / "sat")
    file = tmp_path / "sat/1/mp_rank_00_model_states.pt"
    assert file.stat().st_size > MOST << 10
    steps = (
        ("sat", "theirs", "diffusers", {}),
        ("theirs", "back", "sat", {"model_parallel_size": 3, "verify": True}),
    )
    for source, target, to, more in steps:
        peak = python(CONVERT, tmp_path / source, tmp_path / target, to, json.dumps(more))
        assert int(peak) < MOST, f"{to}: {int(peak) >> 10} MiB"
