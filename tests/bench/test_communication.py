"""The traffic formulas agree with the collectives of two and four processes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cogfast.config import load_config
from cogfast.model.config import TransformerConfig
from cogfast.schema.sat_network import transformer_arguments
from cogfast.train.plan.traffic import (
    Layout,
    Traffic,
    all_reduce,
    count_traffic,
    held_model,
    scatter_or_gather,
)
from tests.support.ranks.communication_ranks import (
    CASES,
    CONTEXT_RUNS,
    MESH_RUNS,
    PERSISTENT,
    QUICK_MESH,
    RANK,
    RUNS,
    SHARED,
)
from tests.support.tiny_run import CHANNELS, ROOT, SIDE, launch_ranks, write_clips, write_config
from tests.support.tiny_transformers import FAMILY, inputs

Sent = dict[str, dict[str, float]]
TOLERANCE = 0.03
NUM_TOKENS = 20  # in the runs: 8 of text, 3 x 2 x 2 of video


def launch(folder: Path, processes: int, *words: str) -> tuple[list[Sent], TransformerConfig]:
    """Launch all processes; return {case: {collective: bytes}} of each, and the transformer of the runs."""
    base = write_config(folder / "base.yaml", write_clips(folder / "data"), "5b")
    script = "tests/support/ranks/communication_ranks.py"
    launch_ranks(processes, script, str(base), str(folder), *words)
    network = load_config([base]).model["network_config"]["params"]
    sent = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return sent, TransformerConfig(**transformer_arguments(network))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sent], TransformerConfig]:
    return launch(tmp_path_factory.mktemp("communication"), 2)


@pytest.fixture(scope="module")
def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Sent], TransformerConfig]:
    """Launch two copies of a model, each on two processes."""
    mine = [item for item in request.session.items if item.module is request.module]
    has_soaks = any(item.get_closest_marker("soak") for item in mine)
    return launch(tmp_path_factory.mktemp("mesh"), 4, *["soak"] * has_soaks)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in RUNS if "reduce" not in name])
def test_traffic_of_a_training_step(launched, name: str) -> None:
    sent, config = launched
    layout = Layout(
        data_size=2,
        zero_stage=int(name[5]),
        accumulation=2,
        bytes_per_number=4,
        persistent_numel=PERSISTENT,
    )
    config = replace(config, lora_rank=RANK) if "lora" in name else config
    expected = count_traffic(config, layout, NUM_TOKENS)
    for rank in sent:
        found = dict(rank[name])
        assert found.pop("gather") == pytest.approx(expected.weights, TOLERANCE)
        assert sum(found.values()) == pytest.approx(
            expected.gradients + expected.scalars, TOLERANCE
        )
        assert set(found) <= {"all_reduce", "scatter"}


@pytest.mark.soak
def test_reducing_to_the_owners_halves_the_gradients(launched) -> None:
    sent, config = launched
    layout = Layout(data_size=2, accumulation=2, bytes_per_number=4)
    gradients = count_traffic(config, layout, NUM_TOKENS).gradients
    for rank in sent:
        assert rank["zero-2, reduce"]["reduce"] == pytest.approx(gradients / 2, TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONTEXT_RUNS)
def test_traffic_of_ranks_that_share_samples(launched, name: str) -> None:
    """ZeRO's copies are the same ranks; it uses the group of all of them."""
    sent, config = launched
    layout = Layout(
        data_size=1,
        context_size=2,
        accumulation=2,
        bytes_per_number=4,
        is_recomputed="adapters" in name,
    )
    config = replace(config, lora_rank=RANK) if "adapters" in name else config
    expected = count_traffic(config, layout, NUM_TOKENS)
    assert expected.activations == 0
    for rank in sent:
        found = Counter(rank[name])
        assert found["gather"] == pytest.approx(expected.weights, TOLERANCE)
        sums = expected.gradients + expected.scalars
        assert found["all_reduce"] == pytest.approx(sums, TOLERANCE)
        inside = [found[f"inside {name}"] for name in ("all_to_all_single", "all_reduce", "gather")]
        assert sum(inside) == pytest.approx(expected.rows, TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("name", SHARED)
def test_traffic_of_a_tensor_parallel_model(launched, name: str) -> None:
    case, policy, splits_rows = SHARED[name]
    latents = inputs(CASES[case].family)["latents"]
    text = CASES[case].config.text_length
    layout = Layout(
        data_size=1,
        model_size=2,
        batch_size=len(latents),
        bytes_per_number=CASES[case].dtype.itemsize,
        is_recomputed=policy != "none",
        splits_rows=splits_rows,
    )
    num_tokens = text + latents[0, 0].numel() // 4  # patches of 2 x 2
    expected = count_traffic(CASES[case].config, layout, num_tokens).activations
    for rank in launched[0]:
        assert sum(rank[name].values()) == pytest.approx(expected, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_MESH else pytest.mark.soak)
        for name in MESH_RUNS
    ],
)
def test_traffic_of_two_tensor_parallel_copies(mesh, name: str) -> None:
    sent, config = mesh
    layout = Layout(
        data_size=2,
        model_size=2,
        accumulation=2,
        bytes_per_number=4,
        splits_rows="split rows" in name,
    )
    config = replace(config, lora_rank=RANK) if "adapters" in name else config
    expected = count_traffic(config, layout, NUM_TOKENS)
    for rank in sent:
        found = Counter(rank[name])
        assert found["copies gather"] == pytest.approx(expected.weights, TOLERANCE)
        assert found["copies all_reduce"] == pytest.approx(expected.gradients, TOLERANCE)
        inside = [found[f"inside {name}"] for name in ("all_reduce", "gather", "scatter")]
        assert sum(inside) == pytest.approx(expected.activations, TOLERANCE)
        # plus one log line: two sums of losses, two of each of four bands and a wait for each copy,
        # in float32
        line = 4 * (2 + 2 * 4 + 2)
        wanted = expected.scalars + all_reduce(line, 4)
        assert found["all_reduce"] == pytest.approx(wanted, TOLERANCE)


@pytest.mark.slow
def test_a_batch_is_sent_before_and_after_encoding(mesh) -> None:
    """For two micro-batches, a clip is sent as bytes, and its latents and text embedding in float32."""
    pixels, latents, text = 9 * 3 * SIDE**2, 4 * CHANNELS * 3 * (SIDE // 8) ** 2, 4 * 8 * 16
    for rank in mesh[0]:
        for found in rank.values():
            assert found["inside broadcast"] == pytest.approx(pixels + latents + text, TOLERANCE)


def test_one_gpu_sends_nothing() -> None:
    assert count_traffic(FAMILY["5b"], Layout(data_size=1), NUM_TOKENS).total == 0


def test_a_ring() -> None:
    """In a ring of four, each GPU sends 3/4 of the bytes once, or twice for an all-reduce."""
    assert scatter_or_gather(400, 4) == 300
    assert all_reduce(400, 4) == 600


def test_sharded_and_replicated_parameters_of_a_block() -> None:
    """Linears are halved; head norms, block norms and the biases of `out` and fc2 are replicated."""
    config = FAMILY["5b"]
    whole, half = (
        sum(p.numel() for p in held_model(config, size).blocks[0].parameters()) for size in (1, 2)
    )
    kept = 4 * config.head_width + 6 * config.hidden_size
    assert half == (whole - kept) / 2 + kept


def test_accumulation_repeats_the_gradients_of_stage_2_and_all_of_stage_3() -> None:
    def among(stage: int, accumulation: int) -> tuple[float, float]:
        layout = Layout(
            data_size=8, zero_stage=stage, accumulation=accumulation, persistent_numel=0
        )
        traffic = count_traffic(FAMILY["5b"], layout, NUM_TOKENS)
        return traffic.gradients, traffic.weights

    assert among(1, 4) == among(1, 1) == among(2, 1)
    assert among(2, 4) == (4 * among(2, 1)[0], among(2, 1)[1])
    assert among(3, 4) == tuple(4 * n for n in among(3, 1))


def test_blocks_below_the_first_adapters_have_no_backward() -> None:
    config = replace(FAMILY["5b"], lora_rank=4)
    every, last = (
        count_traffic(replace(config, lora_layers=layers), Layout(data_size=1, model_size=2), 100)
        for layers in ((0, 1), (1,))
    )
    # Block 0 has no adapters: there is no sum of fc1's input there, none of QKV's in block 1.
    unit, adapters = 100 * config.hidden_size * 2, 4 * 4 * config.hidden_size * 2
    assert every.activations - last.activations == 2 * unit + adapters


def test_lora_under_zero_3_is_refused() -> None:
    config = replace(FAMILY["5b"], lora_rank=4)
    with pytest.raises(ValueError, match="zero_stage=3 with lora_rank is not counted; use 1 or 2"):
        count_traffic(config, Layout(data_size=2, zero_stage=3), NUM_TOKENS)


def of_5b(**layout: int) -> Traffic:
    """Count the traffic of 5B at 49 x 480 x 720."""
    network = load_config([ROOT / "configs/cogvideox_5b.yaml"]).model["network_config"]["params"]
    model = TransformerConfig(**transformer_arguments(network))
    return count_traffic(model, Layout(data_size=1, **layout), 17_776)


def test_four_sums_per_block_of_5b() -> None:
    """Compare with a count by hand: 42 blocks with four all-reduces of 17,776 x 3072 in bf16."""
    unit = 17_776 * 3072 * 2
    found = of_5b(model_size=2).activations
    assert found == pytest.approx(42 * 4 * unit, 1e-3)


def test_exchanges_of_5b_by_hand() -> None:
    """42 blocks, each of 4 (c-1)/c^2 U forward and backward, and U gathered behind and before them."""
    unit = 17_776 * 3072 * 2
    found = of_5b(context_size=4).rows
    assert found == pytest.approx((42 * 2 * 4 * 3 / 16 + 2 * 3 / 4) * unit, 1e-3)
