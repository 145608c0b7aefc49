"""The traced traffic agrees with the collectives of two and four processes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cogfast.config.sat_network import transformer_arguments
from cogfast.distributed.context_parallel import split_context
from cogfast.distributed.parallelize import parallelize
from cogfast.extensions.plan.encoders import Encoders
from cogfast.extensions.plan.memory import Setup, plan_memory, setup_of, stand_in
from cogfast.extensions.plan.seconds import Traffic, count_traffic, micro_batch_work
from cogfast.extensions.plan.trace import Traces
from cogfast.extensions.plan.zero import ZeroRules
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import assemble_transformer, freeze
from cogfast.train.activation_checkpointing import Policy
from cogfast.train.keys import TrainKeys
from cogfast.train.video_size import LatentSize
from tests.support.ranks.communication_ranks import (
    CASES,
    CONTEXT_RUNS,
    MESH_RUNS,
    PERSISTENT,
    RUNS,
    SHARED,
)
from tests.support.runs import run_of
from tests.support.tiny_run import CHANNELS, SIDE, launch_ranks, write_clips, write_config
from tests.support.tiny_transformers import FAMILY, inputs

Sent = dict[str, dict[str, float]]
TOLERANCE = 0.03


def launch(folder: Path, processes: int) -> tuple[list[Sent], Path]:
    """Launch all processes; return {case: {collective: bytes}} of each, and the file of the runs."""
    base = write_config(folder / "base.yaml", write_clips(folder / "data"), "5b")
    script = "tests/support/ranks/communication_ranks.py"
    launch_ranks(processes, script, str(base), str(folder))
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(processes)], base


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sent], Path]:
    return launch(tmp_path_factory.mktemp("communication"), 2)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sent], Path]:
    """Launch two copies of a model, each on two processes."""
    return launch(tmp_path_factory.mktemp("mesh"), 4)


def all_reduce(num_bytes: float, size: int) -> float:
    return 2 * (size - 1) / size * num_bytes


def planned(setup: Setup, persistent: int = 100_000) -> Traffic:
    forward, others = micro_batch_work(plan_memory(setup, None))
    return count_traffic(setup, forward + others, persistent)


def of_run(base: Path, words: list[str], ranks: int, persistent: int = 100_000) -> Traffic:
    words = [word for word in words if not word.startswith("args.load=")]
    config = run_of(base).config(*words)
    return planned(setup_of(config.run, ranks), persistent)


def scalars(ranks: int) -> float:
    """Return the bytes of the gradient norm, and of whether any rank got a stop signal."""
    return all_reduce(2 * 8, ranks)


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_a_training_step(launched, name: str) -> None:
    sent, base = launched
    expected = of_run(base, RUNS[name], 2, PERSISTENT)
    for rank in sent:
        found = dict(rank[name])
        assert found.pop("gather") == pytest.approx(expected.weights, TOLERANCE)
        assert sum(found.values()) == pytest.approx(expected.gradients + scalars(2), TOLERANCE)
        assert set(found) <= {"all_reduce", "scatter"}


@pytest.mark.soak
@pytest.mark.parametrize("name", CONTEXT_RUNS)
def test_traffic_of_ranks_that_share_samples(launched, name: str) -> None:
    """ZeRO's copies are the same ranks; it uses the group of all of them."""
    sent, base = launched
    expected = of_run(base, CONTEXT_RUNS[name], 2)
    for rank in sent:
        found = Counter(rank[name])
        assert found["gather"] == pytest.approx(expected.weights, TOLERANCE)
        assert found["all_reduce"] == pytest.approx(expected.gradients + scalars(2), TOLERANCE)
        inside = [found[f"inside {name}"] for name in ("all_to_all_single", "all_reduce", "gather")]
        assert sum(inside) == pytest.approx(expected.inside, TOLERANCE)


def of_model(
    config: TransformerConfig,
    size: LatentSize,
    *,
    batch: int = 1,
    tensor: int = 1,
    context: int = 1,
    splits_rows: bool = False,
    policy: Policy = "none",
    dtype: torch.dtype = torch.bfloat16,
    **rules: int,
) -> Traffic:
    with torch.device("meta"):
        transformer = assemble_transformer(config).to(dtype)
    freeze(transformer, () if config.lora_rank is None else ["all"], is_lora_only=False)
    for name in transformer.unused_parameter_names():
        transformer.get_parameter(name).requires_grad_(False)
    parallelize(transformer, stand_in(0, tensor), splits_rows)
    if context > 1:
        split_context(transformer, stand_in(context - 1, context))
    number = dtype.itemsize
    given = {"stage": 2, "data_size": context, "weight_bytes": number, "sum_bytes": number} | rules
    zero, none = ZeroRules(**given), Encoders(shape=(0, 0, 0, 0))
    args = TrainKeys(model_parallel_size=tensor, context_parallel_size=context)
    args, traces = args.changed(activation_checkpointing=policy), Traces(transformer)
    given: dict[str, Any] = {
        "traces": traces,
        "rules": zero,
        "size": size,
        "encoders": none,
        "batch_size": batch,
    }
    return planned(Setup(args=args, **given))


def latent_size(latents: torch.Tensor) -> LatentSize:
    channels, frames, height, width = latents.shape[1:]
    return LatentSize(channels, frames, height, width, 4 * frames - 3, 8.0)


@pytest.mark.soak
@pytest.mark.parametrize("name", SHARED)
def test_traffic_of_a_tensor_parallel_model(launched, name: str) -> None:
    case, policy, splits_rows = SHARED[name]
    latents = inputs(CASES[case].family)["latents"]
    given = {"splits_rows": splits_rows, "policy": policy, "dtype": CASES[case].dtype}
    size = latent_size(latents)
    expected = of_model(CASES[case].config, size, batch=len(latents), tensor=2, **given)
    for rank in launched[0]:
        assert sum(rank[name].values()) == pytest.approx(expected.inside, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESH_RUNS)
def test_traffic_of_two_tensor_parallel_copies(mesh, name: str) -> None:
    sent, base = mesh
    expected = of_run(base, MESH_RUNS[name], 4)
    for rank in sent:
        found = Counter(rank[name])
        assert found["copies gather"] == pytest.approx(expected.weights, TOLERANCE)
        assert found["copies all_reduce"] == pytest.approx(expected.gradients, TOLERANCE)
        inside = [found[f"inside {name}"] for name in ("all_reduce", "gather", "scatter")]
        assert sum(inside) == pytest.approx(expected.inside, TOLERANCE)
        # Plus one log line: two sums of losses of clips, of pictures, of samples of column prior and of
        # each of four bands, and a wait for each copy, in float32
        line = 4 * (3 * 2 + 2 * 4 + 2)
        assert found["all_reduce"] == pytest.approx(scalars(4) + all_reduce(line, 4), TOLERANCE)


@pytest.mark.slow
def test_a_batch_is_sent_before_and_after_encoding(mesh) -> None:
    """For two micro-batches, a clip is sent as bytes, and its latents and text embedding in float32."""
    pixels, latents, text = 9 * 3 * SIDE**2, 4 * CHANNELS * 3 * (SIDE // 8) ** 2, 4 * 8 * 16
    for rank in mesh[0]:
        for found in rank.values():
            assert found["inside broadcast"] == pytest.approx(pixels + latents + text, TOLERANCE)


def tiny(**layout: int) -> Traffic:
    return of_model(FAMILY["5b"], latent_size(inputs("5b")["latents"]), **layout)


def test_one_gpu_sends_nothing() -> None:
    assert tiny() == Traffic(gradients=0, weights=0, inside=0)


def test_accumulation_repeats_the_gradients_of_stage_2_and_all_of_stage_3() -> None:
    def among(stage: int, accumulation: int) -> tuple[float, float]:
        traffic = tiny(data_size=8, stage=stage, accumulation=accumulation)
        return traffic.gradients, traffic.weights

    assert among(1, 4) == among(1, 1) == among(2, 1)
    assert among(2, 4) == (4 * among(2, 1)[0], among(2, 1)[1])
    assert among(3, 4)[0] == 4 * among(3, 1)[0]


def of_5b(**layout: int) -> Traffic:
    """Count the traffic of 5B at 49 x 480 x 720."""
    network = run_of("cogvideox_5b.yaml").config().model["network_config"]["params"]
    config = replace(TransformerConfig(**transformer_arguments(network)), num_layers=2)
    return of_model(config, LatentSize.of_model(config), **layout)


def test_four_sums_per_block_of_5b() -> None:
    """Compare with a count by hand: 2 blocks with four all-reduces of 17,776 x 3072 in bf16."""
    unit = 17_776 * 3072 * 2
    assert of_5b(tensor=2).inside == pytest.approx(2 * 4 * unit, 1e-3)


def test_exchanges_of_5b_by_hand() -> None:
    """2 blocks, each of 4 (c-1)/c^2 U forward and backward, and U gathered behind and before them."""
    unit = 17_776 * 3072 * 2
    found = of_5b(context=4).inside
    assert found == pytest.approx((2 * 2 * 4 * 3 / 16 + 2 * 3 / 4) * unit, 1e-3)
