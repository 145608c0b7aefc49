"""Slices of a checkpoint are read as any share of a tensor-parallel model, from shares of any other.

tests/distributed/test_layouts.py resumes runs at other layouts."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cogfast.model.weights.run_checkpoint import RunFiles, open_run
from cogfast.model.weights.shard import Shard
from tests.model.weights.test_weights_load import seal

# Along the first dim or a later one, in parts or not: (shape, dim, num_parts).
CUTS = {
    "first dim": ((8, 5), 0, 1),
    "first dim, three parts": ((24, 7), 0, 3),
    "vector of three parts": ((24,), 0, 3),
    "one row": ((1, 8, 3), 1, 1),
    "second dim": ((7, 8), 1, 1),
    "second dim, two parts": ((5, 16, 3), 1, 2),
}
COUNTS = (1, 2, 4)


def split(whole: Tensor, dim: int, num_parts: int, count: int) -> list[Tensor]:
    """The shares of a tensor."""
    parts = [part.chunk(count, dim) for part in whole.chunk(num_parts, dim)]
    return [torch.cat([part[i] for part in parts], dim) for i in range(count)]


def odd_ranges(numel: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) of unequal ranges that cover it; some end within a row."""
    ends = sorted({min(numel, (i * numel) // count + i % 3) for i in range(1, count)} | {0, numel})
    return list(itertools.pairwise(ends))


def write_files(folder: Path, cut: tuple, whole: Tensor, count: int, num_ranges: int) -> dict:
    """A checkpoint with one parameter `w` in `count` shares, each in ranges of its own file."""
    shape, dim, num_parts = cut
    slices: dict[str, dict] = {}
    folder.mkdir(exist_ok=True)
    for index, share in enumerate(split(whole, dim, num_parts, count)):
        for number, (start, stop) in enumerate(odd_ranges(share.numel(), num_ranges)):
            file, key = f"rank-{number * count + index:05d}.safetensors", f"master/w/{start}"
            save_file({key: share.flatten()[start:stop].clone()}, folder / file)
            about = {"parameter": "w", "kind": "master", "start": start, "numel": stop - start}
            slices[file] = {key: about | ({"share": [index, count]} if count > 1 else {})}
    about = {"shape": list(shape), "dtype": "float32"}
    if count > 1:
        about["cut"] = [dim, num_parts]
    return seal(folder, {"step": 3, "slices": slices, "parameters": {"w": about}})


def numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("stored", COUNTS)
def test_any_range_of_any_share_is_read(tmp_path: Path, cut: tuple, stored: int) -> None:
    shape, dim, num_parts = cut
    whole = numbers(shape)
    for num_ranges in (1, 3):
        manifest = write_files(tmp_path / str(num_ranges), cut, whole, stored, num_ranges)
        files = RunFiles(tmp_path / str(num_ranges), manifest)
        for count in COUNTS:
            for index, share in enumerate(split(whole, dim, num_parts, count)):
                shard = Shard(shape, dim, num_parts, index, count)
                assert shard.share_shape == share.shape
                for start, stop in itertools.chain(*(odd_ranges(share.numel(), n) for n in (1, 5))):
                    out = torch.empty(stop - start)
                    files.fill(out, "w", "master", shard, start)
                    assert torch.equal(out, share.flatten()[start:stop])
        source = open_run(tmp_path / str(num_ranges))
        assert source.shapes == {"w": shape}
        assert torch.equal(source.read("w", None), whole)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_only_what_a_share_needs_is_read(tmp_path: Path, cut: tuple) -> None:
    """Files of other shares may be gone."""
    shape, dim, num_parts = cut
    shares = split(numbers(shape), dim, num_parts, 4)
    source = open_run(tmp_path, manifest=write_files(tmp_path, cut, numbers(shape), 4, 1))
    (tmp_path / "rank-00000.safetensors").unlink()
    (tmp_path / "rank-00001.safetensors").unlink()
    for index in (2, 3):
        found = source.read("w", Shard(shape, dim, num_parts, index, 4))
        assert torch.equal(found, shares[index])
    with pytest.raises(ValueError, match="rank-00000.safetensors: missing, truncated or damaged"):
        source.read("w", None)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_gap_is_refused(tmp_path: Path, cut: tuple) -> None:
    """The second range of share 1 is missing: a reader that needs it gets an error with its place."""
    shape, dim, num_parts = cut
    manifest = write_files(tmp_path, cut, numbers(shape), 2, 3)
    ranges = odd_ranges(torch.Size(shape).numel() // 2, 3)
    del manifest["slices"]["rank-00003.safetensors"]
    seal(tmp_path, manifest)
    source = open_run(tmp_path)
    source.read("w", Shard(shape, dim, num_parts, 0, 2))
    wanted = f"{tmp_path}: its slices of shard 1 of 2 of w end at element {ranges[0][1]} of "
    for shard in (None, Shard(shape, dim, num_parts, 1, 2), Shard(shape, dim, num_parts, 2, 4)):
        with pytest.raises(ValueError, match=wanted):
            source.read("w", shard)
