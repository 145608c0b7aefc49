"""A tiny run of a test: `Run(data, folder).with_lora(4).train(steps=3).resume()`.

A Run is what a user writes: a YAML file, words after it, a trainer's class. Its methods return other
Runs, so that a test or a fixture derives several from one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cogfast.config import Config, load_config
from cogfast.core.keys import with_origins
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint
from cogfast.train.assembly import Datasets, Diffusion, assemble_datasets, assemble_diffusion
from cogfast.train.keys import TrainKeys
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import SIDE, launch_ranks, read_run_weights, run_folder, write_config


@dataclass(frozen=True)
class Run:
    """A run of a tiny model on the clips of write_clips.

    data: the folder of the clips. folder: where the YAML file lies, and by default the runs.
    options: keyword arguments of write_config: lora_rank, dataset, optimizer, keys of `args`.
    words: `key=value` after the YAML file. kind: the class of the trainer. files: YAML files in
    place of the one that is written. last: the trainer of the last `train`.
    """

    data: Path
    folder: Path
    family: str = "5b"
    options: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    allow_import: tuple[str, ...] = ()
    kind: type[Trainer] = Trainer
    files: tuple[Path | str, ...] | None = None
    last: Trainer | None = None

    # --- other Runs ---

    def of(self, family: str) -> Run:
        """Return a run of another member of the family."""
        return replace(self, family=family)

    def of_files(self, *files: Path) -> Run:
        """Return a run of these YAML files, or of none, in place of one that is written."""
        return replace(self, files=files)

    def with_lora(self, rank: int) -> Run:
        return self.with_args(lora_rank=rank)

    def with_vae(self) -> Run:
        """Return a run whose first stage is the VAE of write_clips_with_vae."""
        return self.with_args(has_vae=True)

    def with_args(self, **options: object) -> Run:
        """Change what the YAML file says: keys of `args`, or dataset, optimizer, lora_rank."""
        return replace(self, options={**self.options, **options})

    def with_manifest(self, file: Path, **params: object) -> Run:
        """Return a run on the clips that a table lists. params: of its data set."""
        params = {"video_size": [SIDE, SIDE], "fps": 8, "max_num_frames": 9, **params}
        dataset = {"target": "cogfast.data.datasets.VideoManifest", "params": params}
        return self.with_args(dataset=dataset, train_data=[str(file)])

    def with_words(self, *words: str) -> Run:
        return replace(self, words=(*self.words, *words))

    def into(self, save: Path | str) -> Run:
        """Return a run of the same YAML file whose folder is made below `save`."""
        return self.with_words(f"args.save={save}")

    def cached_in(self, cache: Path | str) -> Run:
        return self.with_words(f"args.latent_cache={cache}")

    def by(self, kind: type[Trainer], *allow_import: str) -> Run:
        """Return a run of another trainer; packages in `allow_import` may define classes."""
        allowed = (*self.allow_import, *allow_import)
        return replace(self, kind=kind, allow_import=allowed)

    # --- what it says ---

    @property
    def base(self) -> Path:
        """The YAML file: of the Runs that share a folder, that of the one that was asked last."""
        path = self.folder / "base.yaml"
        return write_config(path, self.data, self.family, **self.options)

    @property
    def bases(self) -> list[Path | str]:
        return [self.base] if self.files is None else list(self.files)

    def config(self, *words: str) -> Config:
        return load_config(self.bases, [*self.words, *words], self.allow_import)

    def command(self, *words: str, name: str = "train") -> list[str]:
        """Return the words of `cogfast train` for it, or of another command."""
        imports = [word for package in self.allow_import for word in ("--allow-import", package)]
        return [name, "--base", *map(str, self.bases), *self.words, *words, *imports]

    # --- running it in this process ---

    def trainer(self, *words: str) -> Trainer:
        return self.kind(self.config(*words))

    def train(self, *words: str, steps: int | None = None) -> Run:
        """Train to the end, or to step `steps`; return the run with its trainer."""
        limit = () if steps is None else (f"args.train_iters={steps}",)
        trainer = self.trainer(*words, *limit)
        trainer.train()
        return replace(self, last=trainer)

    def resume(self, *words: str, steps: int | None = None) -> Run:
        """Train from the newest checkpoint."""
        return self.train("args.resume=latest", *words, steps=steps)

    # --- running it in other processes ---

    def launch(self, processes: int, *words: str, name: str = "train") -> str:
        """Run the command in so many processes; it must succeed. Return what they print."""
        return launch_ranks(processes, "-m", "cogfast", *self.command(*words, name=name))

    # --- what it left ---

    @property
    def path(self) -> Path:
        """The folder of the run: that of the last `train`, or the only one below `save`."""
        return run_folder(Path(self.config().args.save)) if self.last is None else self.last.folder

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        found = newest_checkpoint(self.path)
        assert found is not None
        return found

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        text = (self.path / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def logged(self, key: str) -> list[float]:
        """Return a number of each line of metrics.jsonl that has it."""
        return [line[key] for line in self.lines if key in line]

    @property
    def losses(self) -> list[float]:
        return self.logged("loss")

    def weights(self, ema: bool = False) -> dict[str, torch.Tensor]:
        """Return the whole weights, or their EMA, of the newest checkpoint in float32."""
        return read_run_weights(self.checkpoint, ema)


def run_of(*files: Path | str) -> Run:
    """Return a run of YAML files that are there; a name alone is that of a file of configs/."""
    return Run(Path(), Path(), files=files)


def datasets_of(
    config: Config, args: TrainKeys | None = None, groups: ProcessGroups | None = None
) -> Datasets:
    """Return the data sets of a configuration."""
    made = config.run
    with with_origins(config.origins):
        return assemble_datasets(
            made.data, args or made.args, made.model.inputs, made.is_masked, groups
        )


def diffusion_of(config: Config) -> Diffusion:
    """Return denoiser, loss and sampler of a configuration."""
    made = config.run
    return assemble_diffusion(made.denoiser, made.loss, made.sampler)
