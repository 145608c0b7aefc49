"""`cogfast train --replay FOLDER`: runs a micro-batch that a run has written, alone and inspected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import to_device
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.transformer import DiffusionTransformer, build_transformer
from cogfast.model.weights.formats.checkpoint_manifest import checkpoints_folder, step_of
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.values import printable
from cogfast.train.assembly import (
    Diffusion,
    assemble_diffusion,
    assemble_encoder,
    assemble_transformer,
)
from cogfast.train.distributed.parallelize import run_without_dynamo
from cogfast.train.distributed.process_groups import ProcessGroups, start_processes
from cogfast.train.encode import Encoder
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.plan.activations import Policy
from cogfast.train.run.health.inspection import damaged_weights, inspect
from cogfast.train.run.health.recorded_batch import RecordedBatch, model_facts, read_recorded


def replay(config: Config, folder: Path) -> Iterator[str]:
    """Run the micro-batches in a run's folder nonfinite/step-N, and yield what they show, by lines.

    config: the run's configuration, for one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--replay runs in one process; start it without torchrun")
    all_recorded = read_recorded(folder)
    args = TrainArguments.from_config(config)
    with torch.device("meta"):  # without memory: to compare the sizes first
        sizes = model_facts(build_transformer(config.model).config)
    for recorded in all_recorded:
        _check_model(folder, recorded, sizes)
    if not args.compile:
        run_without_dynamo()
    first = all_recorded[0]
    weights, text = _choose_weights(folder, first, args)
    yield f"{folder}: {text}; the run inspected it with the weights of step {first.weights_step}"
    groups, diffusion = start_processes(), assemble_diffusion(config)
    transformer = assemble_transformer(config, args, groups, weights, allow_missing=True).train()
    transformer.use_kernels(choose_kernels(args.kernels, first.attention_backend))
    # Recomputing everything takes the least memory and gives the same numbers.
    policy: Policy = "none" if args.activation_checkpointing == "none" else "full"
    policies: list[Policy] = [policy] * len(transformer.blocks)
    apply_policies(transformer, policies)
    encoder = assemble_encoder(config, args, transformer, groups)
    for recorded in all_recorded:
        yield from _run(recorded, transformer, diffusion, encoder, groups)


def _check_model(folder: Path, recorded: RecordedBatch, sizes: dict[str, str]) -> None:
    differ = [key for key in sizes if recorded.model.get(key) != sizes[key]]
    if differ:
        key = differ[0]
        raise ValueError(
            f"--replay {folder}: it is of another model, whose {key} is "
            f"{printable(str(recorded.model.get(key)))[:80]} and not {sizes[key]}; give the "
            "configuration of its run"
        )


def _choose_weights(
    folder: Path, recorded: RecordedBatch, args: TrainArguments
) -> tuple[str | None, str]:
    """Return the checkpoint to load, None for the weights of the start, and a text about it."""
    run = folder.absolute().parents[1]
    places = [checkpoints_folder(run, layout) for layout in ("cogfast", "finetune")]
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    steps = {step_of(p): p for p in found if (p / "manifest.json").is_file()}
    # Prefer the weights of the inspection, then the last ones before the bad step.
    older = [step for step in steps if step is not None and step < recorded.step]
    step = recorded.weights_step if recorded.weights_step in steps else max(older, default=None)
    if step is not None:
        return str(steps[step]), f"weights of step {step} ({steps[step]})"
    if args.load:
        return None, f"weights of step 0 (args.load={args.load})"
    return None, f"weights of step 0 (random, args.seed={args.seed})"


def _run(
    recorded: RecordedBatch,
    transformer: DiffusionTransformer,
    diffusion: Diffusion,
    encoder: Encoder,
    groups: ProcessGroups,
) -> Iterator[str]:
    device = groups.device
    batch = to_device({**recorded.batch, **recorded.texts}, device)
    step, slots = recorded.step - 1, recorded.slots
    rng = SlotRandom(recorded.seed, step, slots, recorded.num_slots, device)

    # Equals Trainer.compute_loss.
    def loss() -> Tensor:
        latents, conditioning = encoder(batch, rng)
        if transformer.config.lora_dropout > 0:
            rng.seed_pytorch("lora dropout")
        assert diffusion.loss is not None, "a run that trains has one"
        return diffusion.loss(transformer, diffusion.denoiser, latents, conditioning, rng).mean()

    damaged = damaged_weights(transformer.named_parameters())
    finding, inputs = inspect(transformer, batch, loss, damaged, recorded.loss_scale)
    where = f"step {recorded.step}, rank {recorded.rank}, micro-batch {recorded.number}"
    samples = [printable(name) for name in recorded.samples]
    report = finding.text(samples)
    yield f"{where}: {report}"
    if report != recorded.report:
        yield f"{where}: the run's report differs: {printable(recorded.report)}"
    before = recorded.inputs
    # sync: a replay
    differ = [k for k, v in inputs.items() if not _is_same(v.cpu(), before.get(k))]
    if differ:
        yield f"{where}: inputs of the network differ from the run's: {', '.join(differ)}"


def _is_same(now: Tensor, before: Tensor | None) -> bool:
    """Compare bit for bit, NaN included."""
    if before is None or (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    return torch.equal(now.nan_to_num(), before.nan_to_num()) and torch.equal(
        now.isnan(), before.isnan()
    )
