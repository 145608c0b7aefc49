"""Adds files in diffusers' format to a checkpoint before it gets its name (args.export).

    <checkpoint>/pytorch_lora_weights.safetensors    LoRA: pipe.load_lora_weights(<checkpoint>)
    <checkpoint>/transformer/                        all weights: from_pretrained of diffusers' class
    <checkpoint>/transformer_ema/                    the same for the averaged (EMA) weights

Rank 0's writing thread reads the files that all ranks have just written, one tensor at a time, and
writes what `cogfast convert` writes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cogfast.core.files import sync
from cogfast.core.values import counted, select
from cogfast.extensions.exports.keys import ExportKeys
from cogfast.extensions.formats.adapters import only_adapters
from cogfast.extensions.formats.peft import FILE_NAME, peft_tensors
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.diffusers import write_diffusers
from cogfast.model.weights.identify import check_complete, identify
from cogfast.model.weights.run_checkpoint import open_run
from cogfast.model.weights.tensor_files import write_safetensors
from cogfast.train.assembly import frozen_to_keep

logger = logging.getLogger(__name__)

_TRANSFORMER, _EMA = "transformer", "transformer_ema"


class Exporter:
    """Writes the files of args.export. last_step: the step at which the run is complete; dtype: of a
    whole model's files. ValueError if checkpoints of this transformer cannot be exported."""

    def __init__(
        self,
        args: ExportKeys,
        transformer: DiffusionTransformer,
        last_step: int,
        dtype: torch.dtype,
    ) -> None:
        self.choice, self.interval = args.export, args.export_interval
        self.last_step, self.dtype = last_step, dtype
        self.is_lora = _trains_adapters(transformer, args.export)

    def __call__(self, step: int, is_stopping: bool) -> Callable[[Path, dict], None] | None:
        """Return what writes the files of the checkpoint of `step`; None if it gets none.

        is_stopping: a signal or time limit ends the run, which may be killed before a whole model is written.
        """
        is_due = self.choice == "all" or (self.interval is not None and step % self.interval == 0)
        is_due &= self.is_lora or not is_stopping
        is_last = self.choice == "last" and step == self.last_step
        return self.write if is_due or is_last else None

    def write(self, draft: Path, manifest: dict) -> None:
        """Write the files into an otherwise complete draft of a checkpoint. A failure costs only these."""
        start, names = time.monotonic(), []
        checkpoint = draft.name.partition(".")[0]  # the name that it gets
        try:
            if self.is_lora:
                names = [FILE_NAME]
                # In the dtype of the checkpoint, float32: the file is small.
                tensors, header = peft_tensors(only_adapters(open_run(draft, manifest=manifest)))
                write_safetensors(draft / FILE_NAME, tensors, header)
            else:
                # The average exists only if the run's optimizer keeps one.
                kinds = {s["kind"] for held in manifest["slices"].values() for s in held.values()}
                names = [_TRANSFORMER, *([_EMA] if "shadow" in kinds else [])]
                for name in names:
                    self._write_model(draft, manifest, name)
        except Exception as error:
            for name in names:
                shutil.rmtree(draft / name, ignore_errors=True)
            (draft / FILE_NAME).unlink(missing_ok=True)
            text = "args.export=%s: checkpoint %s is saved without files for diffusers (%s); write them with "
            why = str(error).partition("\n")[0] or type(error).__name__
            logger.warning(text + "cogfast convert", self.choice, checkpoint, why)
        else:
            seconds = time.monotonic() - start
            logger.info("%s: wrote %s, %.1f s", checkpoint, ", ".join(names), seconds)

    def _write_model(self, draft: Path, manifest: dict, name: str) -> None:
        source, folder = open_run(draft, ema=name == _EMA, manifest=manifest), draft / name
        config = identify(source)
        check_complete(source, config)
        has_noise = bool(select(manifest, "config.model.masked_video_noise"))
        write_diffusers(source, config, folder, self.dtype, has_noise)
        # On disk before the checkpoint gets its name, as its other files are.
        for path in (*folder.iterdir(), folder):
            sync(path)


def _trains_adapters(transformer: DiffusionTransformer, choice: str) -> bool:
    """Return whether a run trains adapters alone. ValueError if its checkpoints lack weights."""
    parameters = dict(transformer.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    adapters = set(filter(is_lora_parameter, parameters))
    if adapters and trained <= adapters:
        return True
    # A run that freezes most of the model does not store what it froze.
    lacking = parameters.keys() - trained - frozen_to_keep(transformer).keys()
    if adapters:
        reason = "the run trains adapters and other weights, which diffusers has no format for"
    elif lacking:
        number = counted(len(lacking), "frozen tensor")
        reason = f"checkpoints of this run lack {number}, first {min(lacking)}"
    else:
        return False
    more = " BASE DIR --to diffusers --merge-lora RUN" * bool(adapters)
    fix = f"set it to none, and use cogfast convert{more} afterwards"
    raise ValueError(f"args.export={choice}: {reason}; {fix}")
