"""`cogfast cache` and training from what it made, against training from pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config import Config, load_config
from cogfast.train.cache import cache_latents
from cogfast.train.trainer import Trainer
from tests.tiny_run import CHANNELS, losses, run_folder, write_clips, write_config

NUM_CLIPS = 20  # three shards


class Recorder(Trainer):
    """Keeps what each micro-batch is encoded to, and the files that it was read from."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[list[Tensor]] = []
        self.paths: list[str] = []

    def compute_loss(self, batch: dict) -> Tensor:
        latents, conditioning = self.encoder(batch, self._random(batch))
        given = (latents, conditioning.text, conditioning.image_latents)
        self.seen.append([x for x in given if x is not None])
        self.paths += batch["paths"]
        return super().compute_loss(batch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, and a small VAE with random weights in vae/."""
    from diffusers import AutoencoderKLCogVideoX

    folder = write_clips(tmp_path_factory.mktemp("data"), NUM_CLIPS)
    torch.manual_seed(0)
    AutoencoderKLCogVideoX(
        block_out_channels=(32, 32, 32, 32), layers_per_block=1, latent_channels=CHANNELS
    ).save_pretrained(folder / "vae")
    return folder


def write_vae_config(path: Path, data: Path, family: str = "5b", **args: object) -> Path:
    """With the VAE in place of the wavelet, which has no variance."""
    config = OmegaConf.load(write_config(path, data, family, **args))
    config.model.first_stage_config = {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(data / "vae")},
    }
    OmegaConf.save(config, path)
    return path


@pytest.mark.parametrize("family", ["5b", "1.5_5b_i2v"])
def test_training_from_the_cache_is_training_from_pixels(
    family: str, data: Path, tmp_path: Path
) -> None:
    """Latents, embeddings and noised images bit for bit, over more than an epoch, and the losses."""
    args = {"train_iters": 6, "split": "4,1,0", "num_workers": 1}
    base = write_vae_config(tmp_path / "base.yaml", data, family, **args)
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    cache_latents(load_config([base], [cache]))
    runs = {}
    for name, more in (("pixels", []), ("cache", [cache])):
        config = load_config([base], [*more, f"args.save={tmp_path / name}"])
        runs[name] = Recorder(config)
        runs[name].train()
    assert runs["cache"].paths == runs["pixels"].paths
    assert len(set(runs["cache"].paths)) == 16 and len(runs["cache"].paths) == 24
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert len(found) == (3 if family.endswith("i2v") else 2)
        for tensor, other in zip(found, expected, strict=True):
            assert torch.equal(tensor, other)
    found, expected = (losses(run_folder(tmp_path / name)) for name in ("cache", "pixels"))
    assert found == expected
    # The text encoder is never built; the VAE only for the first frames of image-to-video.
    built = runs["cache"].encoder
    assert built._text_encoder is None
    assert (built._first_stage is None) == (family == "5b")
