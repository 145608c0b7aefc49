"""The examples of docs/library.md run, and what they make has the shapes that the page names."""

import ast
import re
import subprocess
import sys

import torch

import cogfast
from tests.support.tiny_run import ROOT

TEXT = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHAPED = re.compile(r"^(\w+(?:, \w+)*) = .*  # \[([\d, ]+)\]$", re.DOTALL)


def test_the_examples_run_and_have_their_shapes() -> None:
    found: dict = {}
    num_shapes = 0
    torch.manual_seed(0)
    for example in EXAMPLES:
        lines = example.splitlines()
        for statement in ast.parse(example).body:
            block = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
            exec(block, found)
            if match := SHAPED.match(block):
                shape = [int(n) for n in match[2].split(",")]
                for name in match[1].split(", "):
                    assert list(found[name].shape) == shape, block
                    num_shapes += 1
    assert num_shapes >= 14
    assert all(found[name].grad is not None for name in ("qkv", "a"))


def test_all_functions_are_in_the_page_and_are_imported_late() -> None:
    names = " ".join(cogfast._PUBLIC.values()).split()
    assert set(re.findall(r"cogfast\.(\w+)\(", TEXT)) == set(names)
    code = "import cogfast, sys; print('torch' in sys.modules, cogfast.gelu.__name__, cogfast.gelu.__module__)"
    words = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert words == ["False", "gelu", "cogfast.kernels.gelu"]
