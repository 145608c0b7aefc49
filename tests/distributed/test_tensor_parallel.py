"""Processes that share a model compute the same as one process: output, loss, gradients."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from cogfast.distributed import tensor_parallel
from cogfast.distributed.parallelize import find_shards, parallelize
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.shard import Shard
from tests.model.test_transformer_diffusers import diffusers_model
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS
from tests.support.ranks.tensor_parallel_cases import (
    CASES,
    case_inputs,
    loss_and_gradients,
    materialize,
    round_base,
)
from tests.support.refusals import assert_refused
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import randomize

EVERY_CASE = [name for name in CASES if "compiled" not in name]


def whole_model(name: str) -> DiffusionTransformer:
    transformer = assemble_transformer(CASES[name].config)
    randomize(transformer, seed=0)
    if CASES[name].quantization == "int8":
        round_base(transformer)
    return transformer


def launch(folder: Path, num_processes: int, size: int, cases: list[str]) -> None:
    """Launch processes once, in groups of `size`, for all cases."""
    for name in cases:
        (folder / name.partition("=")[0]).mkdir()
        if name in CASES:
            state = {k: v.clone() for k, v in to_sat_state_dict(whole_model(name)).items()}
            torch.save({"module": state}, folder / name / "mp_rank_00_model_states.pt")
    launch_ranks(
        num_processes,
        "tests/support/ranks/tensor_parallel_ranks.py",
        str(folder),
        str(size),
        *cases,
    )


def read(folder: Path, name: str, size: int, number: int = 0) -> list[dict]:
    """Return the results of a group's processes."""
    with torch.serialization.safe_globals([Shard]):
        return [torch.load(folder / name / f"{number}-{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    launch(folder, 2, 2, [*EVERY_CASE, f"golden={golden}"])
    return folder


def check_case(name: str, ranks: list[dict], number: int = 0) -> None:
    case, transformer = CASES[name], whole_model(name)
    case.freeze(transformer)
    transformer.to(case.dtype)
    one = loss_and_gradients(transformer, case_inputs(name, number))
    if case.dtype == torch.float32:
        error = 1e-6
    else:
        # bf16 itself is off by about this much: what it gives against float32
        reference = whole_model(name)
        case.freeze(reference)
        exact = loss_and_gradients(reference, case_inputs(name, number))
        error = 2.0 * max(
            ((one["gradients"][n].float() - g).abs().max() / g.abs().max()).item()
            for n, g in exact["gradients"].items()
        )
    for rank in ranks:
        assert rank["loss"].item() == pytest.approx(one["loss"].item(), rel=error)
        compare("output", rank["output"], one["output"], error)
        assert rank["gradients"].keys() == one["gradients"].keys()
        for key, wanted in one["gradients"].items():
            shard = rank["shards"].get(key)
            wanted = wanted if shard is None else shard.of(wanted)
            compare(key, rank["gradients"][key], wanted, error)
    for key in one["gradients"].keys() - ranks[0]["shards"].keys():
        first = ranks[0]["gradients"][key]
        assert all(torch.equal(rank["gradients"][key], first) for rank in ranks), key
    assert all(torch.equal(rank["output"], ranks[0]["output"]) for rank in ranks)


def compare(key: str, found: torch.Tensor, wanted: torch.Tensor, error: float) -> None:
    assert found.shape == wanted.shape, key
    difference = (found.float() - wanted.float()).abs().max().item()
    # without rotation the gradient of a key norm's bias is zero but for rounding
    assert difference <= error * wanted.abs().max().item() + 1e-8, f"{key}: {difference}"


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_CASE)
def test_two_processes_equal_one(pair: Path, name: str) -> None:
    check_case(name, read(pair, name, 2))


@pytest.mark.slow
def test_rows_apart_keep_less_for_backward(pair: Path) -> None:
    """Each rank saves half of six activations [B, S, M] per block: the input, the hidden state between
    attention and MLP, both norms' results, and the two products that the gates' gradients need."""
    apart, together = (read(pair, name, 2)[1]["kept"] for name in ("rows 5b", "long text"))
    activation = 2 * 156 * 128 * 4  # [B, S, M] float32
    assert together - apart == pytest.approx(2 * 6 * activation / 2, rel=0.05)


def test_rows_must_split_evenly() -> None:
    with torch.device("meta"):
        transformer = assemble_transformer(CASES["5b"].config)
    parallelize(transformer, ParallelGroup(0, 4, None), splits_rows=True)
    materialize(transformer, seed=0)
    line = "cannot split 106 text and video tokens between 4 ranks evenly"
    assert_refused(lambda: transformer(**case_inputs("5b", 0)), line)


def test_gradients_of_shared_vectors_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in bf16 stays at 256: its next number is 258."""
    others = [1.0] * 4

    def all_reduce(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
        for gradient in others:
            x = x + torch.full_like(x, gradient)
        return x

    monkeypatch.setattr(tensor_parallel, "_ops", SimpleNamespace(all_reduce=all_reduce))
    monkeypatch.setattr(tensor_parallel, "wait_for", lambda x: x)
    vector = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    (shared,) = tensor_parallel.share_vectors([vector], SimpleNamespace(name="ranks"))
    (256 * shared).sum().backward()
    assert vector.grad.tolist() == [260.0] * 3


def test_kernels_chosen_later_are_of_own_rows_too() -> None:
    transformer = whole_model("5b")
    parallelize(transformer, ParallelGroup(1, 2, None), splits_rows=True)
    transformer.use_kernels(choose_kernels("torch"))
    block = transformer.blocks[0]
    assert block.kernels.gelu is block.attention.kernels.gelu is choose_kernels("torch").gelu
    hidden = torch.randn(1, 4, 128)
    shift, scale = torch.randn(2, 1, 2, 128)
    # 5 text rows in front of 8 in all: the second process has one of them
    _, x = block.kernels.adaptive_layernorm(hidden, None, None, shift, scale, 5, 1e-5)
    wanted = choose_kernels().adaptive_layernorm(hidden, None, None, shift, scale, 1, 1e-5)
    torch.testing.assert_close(x, wanted[1])


@pytest.mark.slow
def test_sats_two_files_give_what_its_one_file_gives(pair: Path, golden: Path) -> None:
    wanted = load_file(golden / "t2v_5b" / "io.safetensors")["output"]
    for rank in read(pair, "golden", 2):
        torch.testing.assert_close(rank["output"], wanted, atol=1e-5, rtol=0)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_four_processes_equal_one(tmp_path: Path, size: int) -> None:
    """Four processes run as one group, and as two groups with a batch each."""
    launch(tmp_path, 4, size, [*CASES])
    for name in CASES:
        for number in range(4 // size):
            check_case(name, read(tmp_path, name, size, number), number)


def share(name: str, rank: int, size: int, seed: int = 0) -> DiffusionTransformer:
    """Return one process's shard of the model; it cannot run forward without the other processes."""
    with torch.device("meta"):
        transformer = assemble_transformer(CASES[name].config)
    parallelize(transformer, ParallelGroup(rank, size, None))
    materialize(transformer, seed)
    return transformer


@pytest.mark.parametrize("name", ["2b", "1.5_5b_i2v", "lora"])
def test_shares_are_parts_of_a_whole_model_and_make_it_up(name: str) -> None:
    """New weights of four processes, put together, are those of one process, each element once."""
    whole = dict(assemble_transformer(CASES[name].config, seed=3).named_parameters())
    filled = {key: torch.full_like(p, torch.nan).flatten() for key, p in whole.items()}
    for rank in range(4):
        transformer = share(name, rank, 4, seed=3)
        shards = find_shards(transformer)
        assert [key for key, _ in transformer.named_parameters()] == list(whole)
        for key, parameter in transformer.named_parameters():
            if key not in shards:
                assert torch.equal(parameter, whole[key]), key
                assert not vars(parameter), key
                filled[key].copy_(parameter.detach().flatten())
                continue
            assert parameter.untyped_storage().nbytes() == whole[key].nbytes // 4, (
                "the whole is kept"
            )
            assert parameter.tensor_model_parallel is True
            assert parameter.shard == shards[key] and parameter.shard.shape == whole[key].shape
            places = torch.arange(whole[key].numel()).view(whole[key].shape)
            places = shards[key].of(places).flatten()
            assert filled[key][places].isnan().all(), f"{key}: two processes hold one number"
            filled[key][places] = parameter.detach().flatten()
    assert all(torch.equal(filled[key].view_as(p), p) for key, p in whole.items())


def test_heads_are_not_cut() -> None:
    """Process 1 of 2 has heads 2 and 3 of 4, of q, of k and of v."""
    whole = whole_model("5b")
    parallelize(half := whole_model("5b"), ParallelGroup(1, 2, None))
    ours = half.blocks[0].attention.qkv.weight.view(3, 2, 32, 128)
    assert torch.equal(ours, whole.blocks[0].attention.qkv.weight.view(3, 4, 32, 128)[:, 2:])
    ours = half.blocks[0].attention.out.weight.view(128, 2, 32)
    assert torch.equal(ours, whole.blocks[0].attention.out.weight.view(128, 4, 32)[:, 2:])


@pytest.mark.slow  # diffusers is slow to import
def test_only_our_part_is_read_from_safetensors(tmp_path: Path, monkeypatch) -> None:
    theirs = diffusers_model("5b", num_heads=4)
    theirs.save_pretrained(tmp_path)
    whole = assemble_transformer(CASES["5b"].config)
    load_transformer(whole, tmp_path)
    transformer = share("5b", 1, 2)
    shards = find_shards(transformer)
    narrow, largest = torch.Tensor.copy_, []

    def copy_(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        largest.append(source.untyped_storage().nbytes())
        return narrow(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    load_transformer(transformer, tmp_path, shards=shards)
    wanted = dict(whole.named_parameters())
    for key, parameter in transformer.named_parameters():
        if key == "unused_position_embeddings":
            continue  # not in diffusers' files
        part = shards[key].of(wanted[key]) if key in shards else wanted[key]
        assert torch.equal(parameter, part), key
    assert max(largest) == 4 * 12 * 128 * 64  # a modulation's; of the others a half


def test_a_share_has_a_stretch_of_each_part() -> None:
    assert Shard((12, 6), 0, 3, 1, 2).ranges == [(2, 4), (6, 8), (10, 12)]


LACKING = """
import os, sys
from cogfast.cli.streams import start_logging
from cogfast.distributed.process_groups import start_processes
from cogfast.kernels import torch_library
start_logging()
if os.environ["RANK"] == sys.argv[1]:
    os.environ.update(CXX="no-such-compiler", XDG_CACHE_HOME=sys.argv[2])
    torch_library.HAS_CPU_KERNELS = False
groups = start_processes()
print(f"rank {groups.rank}: {torch_library.HAS_CPU_KERNELS}", flush=True)
groups.close()
"""


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("lacking", [None, 1])
def test_all_ranks_or_none_use_the_cpu_kernels(lacking: int | None, tmp_path: Path) -> None:
    output = launch_ranks(2, "-c", LACKING, str(lacking), str(tmp_path))
    # Both ranks may write into one line.
    assert all(f"rank {rank}: {lacking is None}" in output for rank in (0, 1))
    line = "the C++ kernels are not used, so that a CPU runs PyTorch's ops, which take longer: "
    line += "there is no no-such-compiler; install g++, or set CXX to another"
    assert output.count(line) == (lacking is not None)
