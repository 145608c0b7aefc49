"""A user's program, `python -m scripts.behaviour.planted WORDS`, in which one rank fails.

It has classes of a user (`--allow-import scripts`), and FAULT=PLACE:NUMBER:ACTION in the environment of the
rank that fails: what happens at which call of a place. NODE is a folder that the rank works in, as a
node with a disk of its own does, and DAMAGE a file that is damaged at the start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils import tensorboard

from cogfast.__main__ import main
from cogfast.data.datasets import VideoManifest
from cogfast.model.text_encoder import ByteTextEncoder
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.wavelet_autoencoder import WaveletAutoencoder
from cogfast.train.trainer import Trainer

_calls: Counter[str] = Counter()


def reach(place: str) -> None:
    """Count a call of `place`, and fail if FAULT says so."""
    wanted, number, action = (os.environ.get("FAULT", "") + "::").split(":")[:3]
    _calls[place] += 1
    if place != wanted or _calls[place] != int(number):
        return
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
    elif action in ("full disk", "small disk"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # A part of a checkpoint has more, and the output less.
        limit = 1 << (16 if action == "full disk" else 10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    elif action == "out of memory":
        raise torch.OutOfMemoryError(f"planted in {place}")
    elif action == "no space":
        raise OSError(28, "No space left on device")
    elif action == "exit":
        os._exit(7)
    else:
        raise RuntimeError(f"planted in {place}")


@dataclass
class Clips(VideoManifest):
    def __post_init__(self) -> None:
        reach("open data")
        super().__post_init__()

    def __getitem__(self, index):
        reach("read")
        return super().__getitem__(index)


class Wavelet(WaveletAutoencoder):
    def __init__(self, ckpt_path: str | None = None) -> None:
        reach("build first stage")
        super().__init__(ckpt_path)

    def encode(self, video):
        reach("encode")
        return super().encode(video)

    def decode(self, latents):
        reach("decode")
        return super().decode(latents)


class Text(ByteTextEncoder):
    def forward(self, captions):
        reach("text")
        return super().forward(captions)


class Backward(torch.autograd.Function):
    """The identity, which reports its backward pass."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        reach("backward")
        return gradient


class Network(DiffusionTransformer):
    def __init__(self, config) -> None:
        reach("build model")
        super().__init__(config)

    def forward(self, *arguments, **named):
        reach("forward" if torch.is_grad_enabled() else "forward without gradients")
        return Backward.apply(super().forward(*arguments, **named))


class Failing(Trainer):
    def __init__(self, config) -> None:
        reach("build trainer")
        super().__init__(config)
        reach("trainer is built")

    def losses(self, batch, noised, conditioning):
        reach("losses")
        return super().losses(batch, noised, conditioning)


def _planted(place: str, call: Callable) -> Callable:
    def wrapped(*arguments, **named):
        reach(place)
        return call(*arguments, **named)

    return wrapped


def damage(request: str) -> None:
    """Damage a file of this rank's node: "cut FILE", "remove FILE" or "seed FILE"."""
    kind, _, name = request.partition(" ")
    path = Path(name)
    if kind == "remove":
        path.unlink()
    elif kind == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_text(
            path.read_text().replace('"experiment_name"', '"seed": 5,\n"experiment_name"')
        )


def plant() -> None:
    """Let functions of PyTorch, DeepSpeed and the system fail, too."""
    for owner, name, place in (
        (dist, "init_process_group", "start processes"),
        (deepspeed, "initialize", "build engine"),
        (torch.optim.AdamW, "step", "step"),
        (tensorboard.SummaryWriter, "__init__", "trackers"),
        (os, "fsync", "sync"),
        (os, "replace", "rename"),
        (os, "rename", "rename"),
    ):
        setattr(owner, name, _planted(place, getattr(owner, name)))


if __name__ == "__main__":
    # The classes of the configuration are this module's, under its name.
    from scripts.behaviour import planted

    if node := os.environ.get("NODE"):
        os.chdir(node)
    if request := os.environ.get("DAMAGE"):
        planted.damage(request)
    planted.plant()
    planted.reach("main")
    is_training = sys.argv[1:2] == ["train"]
    if is_training:
        del sys.argv[1]  # main adds it
    sys.exit(main(trainer=planted.Failing if is_training else None))
