"""Checkpoints of tensor-parallel models: saved at one layout, read at any other, bit for bit."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cogfast.distributed.parallelize import find_shards, parallelize
from cogfast.distributed.process_groups import ProcessGroups, start_processes
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.transformer import assemble_transformer
from cogfast.model.weights.formats.checkpoint_manifest import read_manifest
from cogfast.model.weights.formats.run_checkpoint import RunFiles, open_run
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.shard import Shard
from cogfast.train.optimizer import parameter_groups
from cogfast.train.run.checkpoint_loader import load_checkpoint
from cogfast.train.run.checkpoint_writer import CheckpointWriter
from tests.model.weights.test_weights_load import seal
from tests.support import tensor_parallel_cases
from tests.support.tensor_parallel_cases import materialize
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import inputs, randomize

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


def join(shares: list[Tensor], dim: int, num_parts: int) -> Tensor:
    """The tensor that has these shares."""
    parts = [share.chunk(num_parts, dim) for share in shares]
    return torch.cat([share[i] for i in range(num_parts) for share in parts], dim)


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


@dataclass(frozen=True)
class Case:
    """A tiny member of the family in training."""

    model: tensor_parallel_cases.Case
    stage: int
    frozen: tuple[str, ...] = ()  # prefixes of names
    keeps_frozen: bool = True


CASES = {
    "whole": Case(tensor_parallel_cases.Case("2b"), 2, ("blocks.0.fc1", "blocks.1.attention.out")),
    "adapters": Case(
        tensor_parallel_cases.Case("5b", lora_rank=4, trains_lora_only=True, dtype=torch.bfloat16),
        2,
        (),
        False,
    ),
    "stage 3": Case(tensor_parallel_cases.Case("2b"), 3, ("blocks.0.fc2", "blocks.1.norm")),
}
KINDS = ("master", "exp_avg", "exp_avg_sq", "shadow")
STEPS = 3


class Mesh:
    """DeepSpeed's mpu interface; `size` consecutive ranks share a model."""

    def __init__(self, size: int) -> None:
        ranks = list(range(torch.distributed.get_world_size()))
        self.size, self.count = size, len(ranks) // size
        self.data_rank, self.rank = divmod(torch.distributed.get_rank(), size)
        new = torch.distributed.new_group
        self.models = [new(ranks[i : i + size]) for i in ranks[::size]]
        self.columns = [new(ranks[i::size]) for i in range(size)]

    @property
    def tensor(self) -> ParallelGroup:
        return ParallelGroup(self.rank, self.size, self.models[self.data_rank])

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self.columns[self.rank]

    def get_data_parallel_world_size(self) -> int:
        return self.count

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self.models[self.data_rank]

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def make(case: Case, mesh: Mesh | None, is_fresh: bool) -> ZeroEngine:
    """is_fresh: every number that the checkpoint should set has a different value."""
    transformer = assemble_transformer(case.model.config)
    randomize(transformer, seed=0)
    if mesh is not None:
        parallelize(transformer, mesh.tensor)
    case.model.freeze(transformer)
    for name, parameter in transformer.named_parameters():
        if name.startswith(case.frozen or "none"):
            parameter.requires_grad_(False)
        if is_fresh and (parameter.requires_grad or case.keeps_frozen):
            parameter.data.add_(1)
    transformer.to(case.model.dtype)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.model.dtype == torch.bfloat16, "check_grad_overflow": False},
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 10_000},
    }
    optimizer = FusedEmaAdam(parameter_groups(transformer, 0.1), lr=1e-2)
    return ZeroEngine(transformer, optimizer, config, mesh)


def train_step(engine: ZeroEngine, case: Case, step: int) -> None:
    given = inputs(case.model.family, seed=10 * step + engine.data_rank)
    engine.backward(engine(**given).float().square().mean())
    engine.step(1e-2)


def snapshot(engine: ZeroEngine) -> dict:
    """This rank's {kind: {name: [(start, numbers)]}}, the model's weights, and our shards."""
    found: dict = {kind: {} for kind in KINDS}
    for kind, piece in itertools.product(KINDS, engine.slices):
        values = engine.view(piece, kind).clone()
        found[kind].setdefault(piece.parameter, []).append((piece.start, values))
    found["model"], found["shards"] = {}, {}
    for name, parameter in engine.transformer.named_parameters():
        with engine.whole(parameter) as values:
            found["model"][name] = [(0, values.detach().flatten().clone())]
        found["shards"][name] = getattr(parameter, "shard", None)
        found.setdefault("shapes", {})[name] = getattr(parameter, "ds_shape", parameter.shape)
    found["updates"] = {float(engine.state(part)["step"]) for part in range(len(engine.parts))}
    return found


def assemble(ranks: list[dict]) -> dict[str, dict[str, Tensor]]:
    """{kind: {name: whole tensor}} of all ranks' snapshots."""
    whole: dict = {}
    for kind in (*KINDS, "model"):
        whole[kind] = {}
        for name in {name for rank in ranks for name in rank[kind]}:
            shards = [rank["shards"][name] for rank in ranks]
            count = 1 if shards[0] is None else shards[0].count
            shares = []
            for index in range(count):
                held = [
                    r for r, s in zip(ranks, shards, strict=True) if count == 1 or s.index == index
                ]
                ranges = dict(piece for rank in held for piece in rank[kind].get(name, []))
                flat = torch.cat([ranges[start] for start in sorted(ranges)])
                shares.append(flat.view(held[0]["shapes"][name]))
            cut = (0, 1) if count == 1 else (shards[0].dim, shards[0].num_parts)
            whole[kind][name] = join(shares, *cut)
    return whole


def run_case(case: Case, folder: Path, groups: ProcessGroups, meshes: dict[int, Mesh]) -> None:
    """Train at dp 2 x tp 2 and save step 3; continue there and resume in a fresh engine; load at
    dp 4 x tp 1, save that, and load it at tp 4."""

    def note(name: str, engine: ZeroEngine) -> None:
        torch.save(snapshot(engine), folder / f"{name}-{groups.rank}.pt")

    def save(step: int, engine: ZeroEngine) -> None:
        with CheckpointWriter(folder, engine, groups, keep_last=0) as writer:
            writer.save(step, {})

    def load(size: int, step: int) -> ZeroEngine:
        engine = make(case, meshes[size], is_fresh=True)
        path = folder / f"{step:08d}"
        load_checkpoint(path, read_manifest(path), engine, groups)
        return engine

    engine = make(case, meshes[2], is_fresh=False)
    for step in range(STEPS):
        train_step(engine, case, step)
    note("saved", engine)
    save(STEPS, engine)
    train_step(engine, case, STEPS)
    note("continued", engine)
    engine = load(2, STEPS)
    note("dp2 tp2", engine)
    train_step(engine, case, STEPS)
    note("resumed", engine)
    engine = load(1, STEPS)
    note("dp4 tp1", engine)
    save(STEPS + 1, engine)
    note("dp1 tp4", load(4, STEPS + 1))


def main() -> None:
    folder = Path(sys.argv[1])
    groups = start_processes()
    meshes = {size: Mesh(size) for size in COUNTS}
    for name, case in CASES.items():
        run_case(case, folder / name, groups, meshes)
    groups.close()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per case, as four processes left it."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in CASES:
        (folder / name).mkdir()
    launch_ranks(4, "-m", "tests.train.run.checkpoints.test_checkpoint_layouts", str(folder))
    return folder


def read(folder: Path, what: str) -> list[dict]:
    return [torch.load(folder / f"{what}-{rank}.pt", weights_only=False) for rank in range(4)]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            other[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def masters(whole: dict, kind: str = "master", is_frozen_kept: bool = True) -> dict[str, Tensor]:
    """Return a checkpoint's master weights, float32."""
    frozen = {n: w.float() for n, w in whole["model"].items() if n not in whole[kind]}
    return {**whole[kind], **(frozen if is_frozen_kept else {})}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 tp2", "dp4 tp1", "dp1 tp4"])
@pytest.mark.parametrize("name", CASES)
def test_state_moves_to_another_layout(launched: Path, name: str, layout: str) -> None:
    saved, loaded = (assemble(read(launched / name, what)) for what in ("saved", layout))
    for kind in (*KINDS, "model"):
        assert_same(saved[kind], loaded[kind])
    assert all(rank["updates"] == {STEPS} for rank in read(launched / name, layout))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_resumed_on_the_same_layout_is_uninterrupted(launched: Path, name: str) -> None:
    continued, resumed = (
        assemble(read(launched / name, what)) for what in ("continued", "resumed")
    )
    saved = assemble(read(launched / name, "saved"))
    assert not torch.equal(continued["master"][name_of(saved)], saved["master"][name_of(saved)])
    for kind in (*KINDS, "model"):
        assert_same(continued[kind], resumed[kind])


def name_of(whole: dict) -> str:
    return next(iter(whole["master"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_state_moves_to_one_process(launched: Path, name: str) -> None:
    """One process reads the state of four; replicated parameters were written by one rank."""
    groups = start_processes()
    saved = assemble(read(launched / name, "saved"))
    engine = make(CASES[name], None, is_fresh=True)
    manifest = read_manifest(launched / name / "00000003")
    load_checkpoint(launched / name / "00000003", manifest, engine, groups)
    loaded = assemble([snapshot(engine)])
    for kind in (*KINDS, "model"):
        assert_same(saved[kind], loaded[kind])
    numel = {"trained": 0, "frozen": 0}
    for slices in manifest["slices"].values():
        for s in slices.values():
            numel["frozen" if s["kind"] == "frozen" else "trained"] += s["numel"]
    assert numel["trained"] == 4 * sum(w.numel() for w in saved["master"].values())
    frozen = sum(w.numel() for n, w in saved["model"].items() if n not in saved["master"])
    assert numel["frozen"] == (frozen if CASES[name].keeps_frozen else 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_a_share_of_the_model_loads_from_shares(launched: Path, name: str, count: int) -> None:
    case, saved = CASES[name], assemble(read(launched / name, "saved"))
    wanted = masters(saved, "shadow", case.keeps_frozen)
    for index in range(count):
        with torch.device("meta"):
            transformer = assemble_transformer(case.model.config)
        parallelize(transformer, ParallelGroup(index, count, None))
        materialize(transformer, seed=1)
        shards = find_shards(transformer)
        report = load_transformer(
            transformer, launched / name / "00000003", ema=True, shards=shards
        )
        assert report.num_loaded == len(wanted)
        have = dict(transformer.named_parameters())
        for key, whole in wanted.items():
            shard = shards.get(key)
            share = whole
            if shard is not None:
                share = split(whole, shard.dim, shard.num_parts, count)[index]
            assert torch.equal(have[key].detach(), share), key


@pytest.mark.slow
def test_another_model_is_refused_by_whole_shapes(launched: Path) -> None:
    groups = start_processes()
    path = launched / "whole" / "00000003"
    assert read_manifest(path)["parameters"]["blocks.0.attention.qkv.weight"]["shape"] == [384, 128]
    with pytest.raises(ValueError, match=r"another model: \d+ trained parameters differ"):
        engine = make(CASES["adapters"], None, is_fresh=True)
        load_checkpoint(path, read_manifest(path), engine, groups)


if __name__ == "__main__":
    main()
