"""Write the tables of docs/scaling.md from the formulas of cogfast/train/plan/traffic.py:

    python -m bench.scaling.tables

The tables replace the text between two comments of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from cogfast.config import load_config
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.model.config import TransformerConfig
from cogfast.schema.sat_network import transformer_arguments
from cogfast.train.plan.gpus import Gpu, parse_gpu
from cogfast.train.plan.step_time import estimate, stated_rates
from cogfast.train.plan.traffic import Layout, Traffic, count_traffic
from cogfast.train.video_size import LatentSize

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"
START = "<!-- tables: start. Written by python -m bench.scaling.tables; edits are lost. -->"
END = "<!-- tables: end -->"
MODELS = {"2B": "cogvideox_2b", "5B": "cogvideox_5b", "1.5-5B": "cogvideox1.5_5b"}
NUM_GPUS = (8, 64, 512)
GPUS_PER_NODE = 8
LORA_RANK = 128
CARD, POLICY = "h100-80", "pointwise"  # of the predicted steps
NVLINK, BETWEEN_NODES = 370e9, 45e9  # bytes per second and GPU; assumed, not measured


@cache
def read_model(name: str) -> tuple[TransformerConfig, int]:
    """Return the configuration of a transformer and the tokens per sample at its training size."""
    config = load_config([ROOT / "configs" / f"{MODELS[name]}.yaml"])
    model = TransformerConfig(**transformer_arguments(config.model["network_config"]["params"]))
    video = config.data["params"]
    height, width = (side // SPATIAL_COMPRESSION for side in video["video_size"])
    size = (video["max_num_frames"], height, width)
    latents = LatentSize.of_video(model.out_channels, *size, model.patch_size.t, video["fps"])
    return model, latents.num_tokens(model)


def count(name: str, is_lora: bool = False, **layout: object) -> Traffic:
    """Count the traffic of a model in a layout."""
    config, num_tokens = _trained(name, is_lora)
    return count_traffic(config, Layout(**layout), num_tokens)


def _trained(name: str, is_lora: bool) -> tuple[TransformerConfig, int]:
    config, num_tokens = read_model(name)
    return (replace(config, lora_rank=LORA_RANK) if is_lora else config), num_tokens


def write_tables() -> str:
    """Return the tables as Markdown."""
    layouts, samples, stages = [], [], []
    for name in MODELS:
        for is_lora in (False, True):
            sizes = _model_sizes(name)
            layouts += [_layout_row(name, is_lora, size) for size in sizes]
            samples += [_sample_row(name, is_lora, size) for size in sizes if size > 1]
    for accumulation in (1, 4):
        for stage in (1, 2, 3):
            # 64 copies of one GPU each.
            cells = [f"ZeRO-{stage}", f"{accumulation}"]
            for name in MODELS:
                given = {"data_size": 64, "zero_stage": stage, "accumulation": accumulation}
                traffic = count(name, **given)
                cells.append(f"{_gb(traffic.gradients)} + {_gb(traffic.weights)}")
            stages.append(cells)
    numbers = [f"{num_gpus} GPUs" for num_gpus in NUM_GPUS]
    heads = ["model", "trained", "copy on", "inside a copy", "recomputed"]
    return "\n".join(
        [
            "GB and seconds per step; ZeRO-2, one sample per copy and step:",
            "",
            *_table([*heads, *(f"among copies, {number}" for number in numbers)], layouts),
            "",
            f"One sample on several GPUs of a node, with `{POLICY}`: GB sent per step inside the copy, and",
            f"among the GPUs with the same weights; predicted seconds of a step on {CARD}:",
            "",
            *_table([*_SAMPLE_HEAD], samples),
            "",
            "Gradients + weights among 64 copies, GB per step, full training:",
            "",
            *_table(["stage", "micro-batches per step", *MODELS], stages),
        ]
    )


_SAMPLE_HEAD = ("model", "trained", "GPUs", "tensor", "context", "context, weights")
_SAMPLE_HEAD += ("tensor, s", "context, s")


def _sample_row(name: str, is_lora: bool, size: int) -> list[str]:
    """Return a row that compares tensor parallelism on `size` GPUs with context parallelism."""
    config, num_tokens = _trained(name, is_lora)
    rates = stated_rates(_card())
    alone = Layout(data_size=1, is_recomputed=True)
    steps, sent = [], []
    for layout in (replace(alone, model_size=size), replace(alone, context_size=size)):
        sent.append(count_traffic(config, layout, num_tokens))
        steps.append(estimate(config, num_tokens, layout, rates, POLICY))
    tensor, context = sent
    cells = [_gb(tensor.activations), _gb(context.rows), _gb(context.among_copies)]
    cells += [f"{step.seconds:.3g}" for step in steps]
    return [name, "LoRA" if is_lora else "all", str(size), *cells]


def _card() -> Gpu:
    gpu = parse_gpu(CARD)[2]
    assert gpu is not None, CARD
    return gpu


def _model_sizes(name: str) -> list[int]:
    """Return the possible numbers of GPUs per copy: divisors of a node and of the heads."""
    heads = read_model(name)[0].num_attention_heads
    return [n for n in range(1, GPUS_PER_NODE + 1) if GPUS_PER_NODE % n == 0 and heads % n == 0]


def _layout_row(name: str, is_lora: bool, model_size: int) -> list[str]:
    cells = [name, "LoRA" if is_lora else "all", f"{model_size} GPU{'s' * (model_size > 1)}"]
    for is_recomputed in (False, True):
        given = {"data_size": 1, "model_size": model_size, "is_recomputed": is_recomputed}
        inside = count(name, is_lora, **given).activations
        cells.append(_gb_and_seconds(inside, NVLINK) if model_size > 1 else "–")
    for num_gpus in NUM_GPUS:
        data_size = num_gpus // model_size
        traffic = count(name, is_lora, data_size=data_size, model_size=model_size)
        # A ring within a node runs over NVLink; a ring over nodes is as fast as its slowest link.
        speed = NVLINK if num_gpus <= GPUS_PER_NODE else BETWEEN_NODES
        cells.append(_gb_and_seconds(traffic.among_copies, speed) if data_size > 1 else "–")
    return cells


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g}"


def _gb_and_seconds(num_bytes: float, speed: float) -> str:
    return f"{_gb(num_bytes)} GB, {num_bytes / speed:.2g} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def read_tables(page: str) -> str:
    """Return the text between the comments of the page."""
    return page.partition(START)[2].partition(END)[0].strip()


def main() -> None:
    page = PAGE.read_text()
    before, after = page.partition(START)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{write_tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
