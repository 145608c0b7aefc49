"""LoRA that can learn nothing is found, and the tensor-parallel rank whose copy of a parameter differs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cogfast.model.transformer import assemble_transformer
from cogfast.train.watchers import parameter_checks
from cogfast.train.watchers.parameter_checks import hash_parameters, lora_cannot_learn
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import FAMILY

MODELS = ("5b", "bf16")
TOP_BIT = {"5b": 30, "bf16": 14}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return, for each of the four ranks, {model: {case: error message}}."""
    folder = tmp_path_factory.mktemp("replicas")
    launch_ranks(4, "tests/support/ranks/replica_check_ranks.py", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_equal_copies_pass(found: list[dict], model: str) -> None:
    """Shards, which always differ, and the padding of ZeRO-3's partitions are not compared."""
    for rank in found:
        for case in ("equal", "as before", "between", "awaited", "zero-3, equal"):
            assert rank[model][case] == "", case


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_changed_copy_ends_its_group(found: list[dict], model: str) -> None:
    """One changed bit, swapped elements within a chunk and across chunks, and two parameters."""
    name = "text_embedding.weight"
    cases = {
        "bit 0": name,
        f"bit {TOP_BIT[model]}": name,
        "swapped with 1": name,
        "swapped with 4095": name,
        "two parameters": "odd and 1 more",
    }
    for case, what in cases.items():
        errors = [rank[model][case] for rank in found]
        assert errors[0] == errors[1]
        assert f"no longer have the same {what}: rank 1 differs from rank 0" in errors[0], case
        assert errors[0].startswith("step 3: ")
        assert "Resume from the last checkpoint" in errors[0]
        assert errors[2:] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_changed_part_is_found_under_zero_3(found: list[dict], model: str) -> None:
    errors = [rank[model]["zero-3, bit"] for rank in found]
    assert errors[:2] == ["", ""]
    assert errors[2] == errors[3]
    assert "no longer have the same odd: rank 1 differs from rank 0" in errors[2]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_check_sends_eight_bytes_a_parameter(found: list[dict], model: str) -> None:
    """Each rank sends 8 bytes per parameter to every other rank of the group."""
    for rank in found:
        assert rank[model]["sent"] == {"gather": 8 * rank[model]["copies"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_hash_is_that_of_whole_numbers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash equals that of Python's integers modulo 2^64, for any order of summation."""
    monkeypatch.setattr(parameter_checks, "_CHUNK", 10)
    values = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = values.flatten().view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).tolist()
    golden, wanted = 0x9E3779B97F4A7C15, 0
    for start in range(0, 25, 10):
        wanted *= 0x2545F4914F6CDD1D
        for place, value in enumerate(integers[start : start + 10]):
            weight = (place + 1) * golden % 2**64
            weight = weight - 2**64 if weight >= 2**63 else weight
            wanted += value * ((weight ^ (weight >> 32)) * golden | 1)
    hashes = hash_parameters([torch.nn.Parameter(values), torch.nn.Parameter(values.T)])
    assert hashes[0].item() == (wanted + 2**63) % 2**64 - 2**63
    assert hashes[1] != hashes[0]


def test_the_modulation_of_all_ranks_counts() -> None:
    """A rank whose part of the modulation is zero does not refuse what another rank has trained."""
    transformer = assemble_transformer(replace(FAMILY["5b"], num_layers=1, lora_rank=2))
    with torch.no_grad():
        transformer.output.weight.fill_(1.0)
        for name, parameter in transformer.blocks.named_parameters():
            if ".modulation." in name:
                parameter.zero_()
    own = []
    others = SimpleNamespace(decide=lambda flag: own.append(flag) or True)
    assert lora_cannot_learn(transformer, others) is None
    alone = SimpleNamespace(decide=lambda flag: flag)
    assert lora_cannot_learn(transformer, alone) == "the blocks' modulation is zero"
    assert own == [False]
