"""The lines that a run logs at its start and at its end, and what its errors say of how to continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cogfast.core.addresses import is_url, name_of
from cogfast.core.values import counted
from cogfast.distributed.process_groups import StopRequest
from cogfast.distributed.stop_signals import keep_in_last_line
from cogfast.extensions.stores.store import local_cache
from cogfast.extensions.table import hooks
from cogfast.train.preflight.parts import warn_of_image_scale
from cogfast.train.run.terminal import log_facts, log_results

if TYPE_CHECKING:
    from cogfast.train.run.parts import Parts

logger = logging.getLogger(__name__)


def log_start(parts: Parts, learning_rate: Callable[[int], float]) -> None:
    """Log what is trained, on what and where. learning_rate: by step, as the trainer has it."""
    launch, data, folder = parts.launch, parts.data, parts.folder
    args, groups, config = launch.args, launch.groups, parts.model.transformer.config
    names = ("GPU", "GPUs") if groups.device.type == "cuda" else ("process", "processes")
    rows = ", rows split" if args.sequence_parallel else ""
    context = f" x cp {groups.context_size}" if groups.context_size > 1 else ""
    mesh = f"dp {groups.data_size}{context} x tp {groups.tensor_size}{rows}"
    ranks = f"{counted(groups.world_size, *names)} ({mesh})"
    batch = f"dp {groups.data_size} x batch {args.batch_size}"
    batch += f" x accumulation {args.gradient_accumulation_steps}"
    places = [*args.train_data, *args.valid_data, args.latent_cache or "", name_of(folder.path)]
    rate = f"{args.lr:g}, {args.lr_schedule}"
    if learning_rate is not folder.learning_rate:
        rate = f"{learning_rate(folder.step):g} in the first step, set by the trainer"
    own = launch.own.get("trainer", {}).get("name")
    facts = {
        "run folder": name_of(folder.path),
        "local cache": str(local_cache()[0]) if any(map(is_url, places)) else None,
        "trained on": f"{ranks}, ZeRO-{parts.engine.stage}, {args.precision}",
        "global batch": f"{data.global_batch} = {batch}",
        "data": counted(len(data.datasets.train), "sample"),
        "steps": f"{folder.step} to {data.num_steps}",
        "model": f"{counted(config.num_layers, 'layer')} of width {config.hidden_size}",
        "conditions": ", ".join(parts.model.encoder.conditions) or None,
        "trained": f"{parts.model.num_trained / 1e6:.2f} M parameters",
        "adapters": config.adapters,
        "learning rate": f"{rate}, weight decay {args.weight_decay:g}",
        "trainer": f"{own}; held-out losses are the configured loss" if own else None,
    }
    log_facts({name: fact for name, fact in facts.items() if fact is not None})


def log_end(parts: Parts, step: int, history: Sequence[dict], stop: StopRequest) -> None:
    """Log why the run ended, where its checkpoint is, its last results, and what may follow.

    history: lines of metrics.jsonl.
    """
    run, num_steps = parts.launch.run, parts.data.num_steps
    is_finished = step >= num_steps
    if is_finished:
        path = name_of(parts.writer.folder.of_step(step))
        logger.info("finished at step %d; checkpoint: %s", step, path)
    else:
        key = f"args.exit_interval={run.args.exit_interval}"
        reason, how = stop.reason if stop.is_stopping else key, parts.hints.how_to_resume()
        logger.info("stopped at step %d of %d by %s; %s", step, num_steps, reason, how)
    log_results(history, parts.evaluator and parts.evaluator.samples)
    network = run.network.config
    # (run, folder, number of steps, is_lora, shows_ema)
    for log_commands in hooks("next_commands") if is_finished else ():
        is_lora = network.lora_rank is not None
        log_commands(run, name_of(parts.folder.path), step, is_lora, parts.shows_ema)
    warn_of_image_scale(run.model, run.args.load, network, is_end=True)


@contextmanager
def explained(parts: Parts) -> Iterator[None]:
    """Add to an error of the block how to continue the run, and end the run's log with the block."""
    launch, writer, hints = parts.launch, parts.writer, parts.hints
    try:
        yield
    except Exception as error:
        if isinstance(error, KeyError) and error.args == ("mp4",):
            error.add_note("a latent cache holds no pixels; set args.latent_cache=null")
        # On a line of its own: error messages are cut, and this is all that names the command.
        if (text := hints.how_to_upload()) and launch.groups.is_main:
            logger.error("%s", text)
        # For the last line, also if torchrun ends this rank because of another one's error.
        hint = hints.how_to_resume()
        keep_in_last_line(f"; {hint}")
        if (writer.saved or writer.folder.unsent) and hint not in str(error):
            error.add_note(hint)
        launch.log.end(error)
        raise
    finally:
        launch.log.end()
        launch.held.close()


def check_end(parts: Parts, step: int, stop: StopRequest) -> None:
    """Raise RuntimeError if a run that ended at `step` must not end with status 0."""
    if parts.launch.args.elastic != "off" and stop.is_by_signal and not stop.is_asked:
        # Status 1: torchrun restarts these ranks, but not those of the machine with the signal.
        raise RuntimeError("a signal to another machine ended these ranks, too")
    num_skipped = int(parts.engine.num_skipped)  # sync: once
    if parts.folder.step == 0 and step == num_skipped == parts.data.num_steps:
        text = f"the run has trained nothing: all {counted(num_skipped, 'step')} had non-finite gradients "
        raise RuntimeError(f"{text}and were skipped; look at the first warning above")
