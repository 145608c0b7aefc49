"""Step times of `cogfast plan`: the line, the table, the link, and where nothing is predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cogfast.cli.plan_options import parse_plan
from cogfast.config import load_config
from cogfast.diagnostics.plan import describe_plan
from cogfast.train.plan.gpus import GPUS
from cogfast.train.plan.step_time import estimate, stated_rates
from cogfast.train.plan.traffic import Layout
from tests.support.tiny_run import write_clips, write_config
from tests.support.tiny_transformers import FAMILY

H100 = next(gpu for gpu in GPUS if gpu.name == "h100-80")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    return write_config(folder / "base.yaml", write_clips(folder / "data", num_clips=2))


def test_the_step_follows_the_configuration(base: Path) -> None:
    keys = ["deepspeed.gradient_accumulation_steps=3", "args.activation_checkpointing=full"]
    config = load_config([base], keys)
    found = json.loads(describe_plan(config, "h100-80", 4, as_json=True))["step"]
    network = FAMILY["5b"].__class__(**_network(config))
    layout = Layout(data_size=4, batch_size=4, accumulation=3, bytes_per_number=4)
    wanted = estimate(
        network,
        8 + 3 * 2 * 2,
        layout,
        stated_rates(H100),
        "full",
        overlaps_gradients=False,
        bucket_numel=100_000,
    )
    assert found["seconds"] == wanted.seconds
    assert found["communication"] == wanted.communication > 0
    assert not found["is_measured"]
    text = describe_plan(config, "h100-80", 4)
    assert f"samples/s\n  {wanted.source}; without VAE and text encoder\n" in text


def _network(config) -> dict:
    from cogfast.schema.sat_network import transformer_arguments

    return transformer_arguments(config.model.network_config.params)


def test_the_link_counts_between_machines(base: Path) -> None:
    config = load_config([base])

    def communication(num_gpus: int, link: float | None) -> float:
        text = describe_plan(config, "h100-80", num_gpus, as_json=True, link=link)
        return json.loads(text)["step"]["communication"]

    assert communication(8, 1) == communication(8, None)
    assert communication(16, 1) == pytest.approx(10 * communication(16, 10))
    assert communication(16, 45) == communication(16, None)


def test_the_table_has_a_row_for_every_layout(base: Path) -> None:
    """The tiny model has 2 heads, which 4 GPUs cannot share."""
    text = describe_plan(load_config([base]), "h100-80", 1, has_table=True)
    head, *rows = text.split("\n\n")[-1].splitlines()
    assert head.split() == [
        "GPUs",
        "tp",
        "GiB",
        "per",
        "GPU",
        "fits",
        "s",
        "per",
        "step",
        "MFU",
        "samples/s",
    ]
    assert [tuple(map(int, row.split()[:2])) for row in rows] == [
        (n, tp) for tp in (1, 2, 4) for n in (1, 2, 4, 8, 64)
    ]
    by_layout = {tuple(row.split()[:2]): row for row in rows}
    assert by_layout["1", "2"].endswith("1 GPU: not a multiple of 2")
    assert "num_attention_heads=2" in by_layout["8", "4"]
    assert re.search(r"yes +\d+\.\d+ +\d+\.\d% +\d", by_layout["8", "2"])
    speeds = [float(by_layout[n, "1"].split()[-1]) for n in ("1", "2", "4", "8")]
    assert speeds == sorted(speeds)


def test_nothing_is_predicted_without_rates(base: Path) -> None:
    config = load_config([base])
    assert "step" not in describe_plan(config, "80", 1).split("peak:")[1]
    assert json.loads(describe_plan(config, "80", 1, as_json=True))["step"] is None
    offload = ["deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    text = describe_plan(load_config([base], offload), "h100-80", 1)
    assert "step time: not predicted for sampling and offload" in text


def test_options(base: Path) -> None:
    request = parse_plan(["--base", str(base), "--link", "12.5", "--table"])
    assert (request.link, request.has_table) == (12.5, True)
    with pytest.raises(ValueError, match="leave out --json or --table"):
        parse_plan(["--base", str(base), "--json", "--table"])
