"""Pickles that would keep torch's unpickler busy for ever, or fill the memory, are refused at once;
those of torch.save, with all that trainers put into them, are read."""

from __future__ import annotations

import argparse
import pickle
import random
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from cogfast.model.weights.formats.pickle_scan import PickleError, check_pickle
from cogfast.model.weights.formats.torch_files import read_torch_file


def nested(levels: int) -> tuple:
    """A tuple of 2**levels numbers, of which each level is stored once."""
    found: tuple = (1, 2)
    for _ in range(levels):
        found = (found, found)
    return found


class Call:
    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


class WithState:
    """Pickled, an OrderedDict whose state is `state`."""

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple:
        return OrderedDict, (), self.state


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


# A dict with a deep tuple as its key: the tuple hashes itself before pickle.dumps could end.
KEY = b"\x80\x02}" + number(1) + b"\x85" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
LONG = list(range(10_000))
ITEMS = {i: i for i in range(10_000)}
TEXT = "x" * 10**6
HOSTILE = {
    "key": KEY,
    "name of a storage": b"\x80\x02" + b"X\x07\x00\x00\x00storage" + KEY[3:-4] + b"\x86Q.",
    "set": pickle.dumps([Call(set, (nested(60),))], 2),
    "set of a list": pickle.dumps([Call(set, LONG) for _ in range(1000)], 2),
    "counter": pickle.dumps([Call(Counter, LONG) for _ in range(1000)], 2),
    "ordered": pickle.dumps([Call(OrderedDict, ITEMS) for _ in range(1000)], 2),
    "state": pickle.dumps([WithState(ITEMS) for _ in range(1000)], 2),
    "text": pickle.dumps([Call(bytearray, TEXT, "utf-8") for _ in range(1000)], 2),
    "any call": pickle.dumps(Call(torch._tensor._rebuild_from_type_v2, set, set, ([1],), {}), 2),
    "bytes": pickle.dumps(Call(bytearray, 2**40), 2),
    "objects": pickle.dumps(Call(np._core.multiarray._reconstruct, np.ndarray, (2**40,), "O"), 2),
    "depth": b"\x80\x02K\x01" + b"\x85" * 100_000 + b".",
    "opcode": pickle.dumps("x", 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_endless_work_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PickleError):
        check_pickle(HOSTILE[name])
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": torch.zeros(2)}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, HOSTILE[name] if entry.endswith("data.pkl") else content)
    with pytest.raises(
        ValueError, match=r"states.pt: refused, its pickle is not one of tensors \("
    ):
        read_torch_file(file)


def test_pickles_that_trainers_save_are_read(tmp_path: Path) -> None:
    """State dicts with metadata, parameters, views, scalars, generators' states, plain values."""
    linear = torch.nn.Linear(3, 2)
    content = {
        "module": linear.state_dict(),  # with a _metadata attribute
        "parameters": dict(linear.named_parameters()),
        "view": torch.arange(12.0).reshape(3, 4).t()[1:],
        "shared": [(2, 3), (2, 3)],
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "ds_config": {"a": [1, 2.5, None, True, {"b": "x" * 10_000}], "size": torch.Size([2, 3])},
        "dtype": torch.bfloat16,
    }
    file = tmp_path / "a.pt"
    torch.save(content, file)
    found = read_torch_file(file)
    assert found.keys() == content.keys()
    assert torch.equal(found["view"], content["view"])
    assert found["random_rng_state"] == content["random_rng_state"]
    assert np.array_equal(found["np_rng_state"][1], content["np_rng_state"][1])
    assert found["ds_config"] == content["ds_config"]


def test_a_large_model_is_scanned() -> None:
    """The tensors of five 5B models stay within the bounds of the scan."""
    state = {f"blocks.{i}.weight": torch.zeros(1) for i in range(5_000)}
    data = pickle.dumps({"module": {k: Call(float, "1.5", v.shape) for k, v in state.items()}}, 2)
    check_pickle(data)


def test_other_classes_are_refused_by_torch(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(a=1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="would run pickled code .*Namespace"):
        read_torch_file(tmp_path / "a.pt")
