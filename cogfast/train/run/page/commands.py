"""The commands that people use next on a run: resume, sample, convert, compare."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cogfast.train.run.page.record import RunRecord
from cogfast.train.run.page.settings import NAME as CONFIG_NAME


@dataclass(frozen=True, slots=True)
class Command:
    """A command line with its purpose and, where needed, a note."""

    title: str
    line: str
    note: str = ""


def commands_of(record: RunRecord) -> Iterator[Command]:
    """Yield the commands of a run. Those that need weights are left out until a checkpoint exists."""
    run = shlex.quote(str(record.folder))
    if record.checkpoint is not None:
        yield _resume(record)
        yield from _sample(record, run)
        yield from _convert(record, run)
    yield Command("Write this page again", f"cogfast report {run}")
    yield Command(
        "Compare with another run", f"cogfast report {run} OTHER_RUN --out comparison.html"
    )


def _resume(record: RunRecord) -> Command:
    run = shlex.quote(str(record.folder))
    files = _files(record)
    config = " ".join(shlex.quote(str(record.folder / name)) for name in files)
    words = [_launcher(record), "train", "--base", config, "--resume", run]
    allowed = record.facts.allow_import if record.facts is not None else []
    if allowed:
        words += ["--allow-import", *map(shlex.quote, allowed)]
    is_done = record.num_steps is not None and record.step >= record.num_steps
    if is_done:
        words.append("args.train_iters=MORE_STEPS")
    assert record.checkpoint is not None, "the caller checks"
    return Command("Train on" if is_done else "Resume", " ".join(words), _resumed_from(record))


def _resumed_from(record: RunRecord) -> str:
    assert record.checkpoint is not None, "the caller checks"
    return (
        f"Continues from {record.checkpoint.relative_to(record.folder)}. Relative paths start at the "
        "folder in which the run was started."
    )


def _files(record: RunRecord) -> list[str]:
    """Return the run's newest configuration, which is complete."""
    return [list(record.settings.changes)[-1] if record.settings.changes else CONFIG_NAME]


def _launcher(record: RunRecord) -> str:
    """Return the command that starts as many processes as the run had."""
    environment: dict[str, Any] = (
        dict(list(record.environments.values())[-1:][0]) if record.environments else {}
    )
    world, devices = environment.get("world_size"), environment.get("devices")
    if not isinstance(world, int) or isinstance(world, bool) or world <= 1:
        return "cogfast"
    here = len(devices) if isinstance(devices, list) and devices else world
    if here < world and world % here == 0:
        nodes = f"--nnodes={world // here} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 "
        return f"torchrun {nodes}--nproc_per_node={here} --no-python cogfast"
    return f"torchrun --nproc_per_node={world} --no-python cogfast"


def _sample(record: RunRecord, run: str) -> Iterator[Command]:
    prompt = '--prompt "A PROMPT OF YOUR OWN"'
    image = " --image FIRST_FRAME.png" if record.settings.get("model.noised_image_input") else ""
    yield Command("Sample a video", f"cogfast sample {run} {prompt}{image} --out samples")


def _convert(record: RunRecord, run: str) -> Iterator[Command]:
    if record.settings.is_lora:
        yield Command(
            "Convert to a LoRA file",
            f"cogfast convert {run} lora --to peft",
            "For load_lora_weights of diffusers.",
        )
    else:
        yield Command(
            "Convert to diffusers",
            f"cogfast convert {run} pipeline --to diffusers",
            "For CogVideoXTransformer3DModel.from_pretrained. With --ema: the averaged weights.",
        )
    yield Command("Convert to SAT", f"cogfast convert {run} sat --to sat")
