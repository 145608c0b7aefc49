"""Clips and captions that CogVideo's diffusers trainer has encoded (args.trusted_cache)."""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from safetensors.torch import load_file, save_file
from torch import Tensor

from cogfast.config import Config
from cogfast.core.shapes import PatchSize
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import BatchLoader
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.cache.entries import CachedVideos
from cogfast.train.assembly import assemble_order
from cogfast.train.encode import Encoder
from cogfast.train.preflight.check import check_cache
from tests.extensions.cache.test_cache import contents, datasets_of
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, SIDE, write_clips_with_vae
from tests.support.video_files import decode_all

NUM_CLIPS, SCALE = 4, 0.7
FOLDER = {
    "5b": f"cogvideox-t2v/9x{SIDE}x{SIDE}",
    "5b_i2v": f"cogvideox-i2v/9x{SIDE}x{SIDE}",
    "1.5_5b": f"cogvideox1.5-t2v/17x{SIDE}x{SIDE}",
}
Theirs = Callable[..., Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips_with_vae(tmp_path_factory.mktemp("data"), NUM_CLIPS, CHANNELS)


@pytest.fixture
def theirs(data: Path, tmp_path: Path) -> Theirs:
    """Write data_root/cache with the statements of their T2VDataset and Trainer.encode_video."""
    vae = AutoencoderKLCogVideoX.from_pretrained(data / "vae")

    def write(
        family: str = "5b",
        without: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        scale: float = SCALE,
    ) -> Path:
        torch.manual_seed(1)
        num_frames = 17 if family.startswith("1.5") else 9
        latents = tmp_path / "cache" / "video_latent" / FOLDER[family]
        texts = tmp_path / "cache" / "prompt_embeddings"
        latents.mkdir(parents=True, exist_ok=True)
        texts.mkdir(exist_ok=True)
        for i in set(range(NUM_CLIPS)) - set(without):
            frames = torch.from_numpy(decode_all(data / "videos" / f"{i}.mp4"))[:num_frames]
            pixels = frames.permute(3, 0, 1, 2)[None] / 255 * 2 - 1
            with torch.no_grad():
                encoded = vae.encode(pixels).latent_dist.sample() * scale
            encoded = encoded[0].to(dtype)
            save_file({"encoded_video": encoded}, latents / f"{i}.safetensors")
            prompt = f"bar number {i} moves"
            name = str(hashlib.sha256(prompt.encode()).hexdigest())
            embedding = torch.randn(8, 16).to(dtype)
            save_file({"prompt_embedding": embedding}, texts / f"{name}.safetensors")
        return tmp_path / "cache"

    return write


@pytest.fixture
def ours(run: Run, tmp_path: Path) -> Run:
    # The result in float32 depends on how many clips are encoded together.
    run = run.with_vae().with_words("model.en_and_decode_n_samples_a_time=1")
    return run.cached_in(tmp_path / "ours")


@pytest.fixture
def trusting(ours: Run, tmp_path: Path) -> Run:
    return ours.with_words(f"args.trusted_cache={tmp_path / 'cache'}")


def dataset(config: Config) -> CachedVideos:
    found = datasets_of(config).train
    assert isinstance(found, CachedVideos)
    return found


def batch_of(config: Config) -> dict:
    videos = dataset(config)
    order = assemble_order(videos, 0, NUM_CLIPS)
    with BatchLoader(videos, order, micro_batch=NUM_CLIPS, num_workers=0) as batches:
        return next(batches)


def latents_of(batch: dict) -> Tensor:
    """Latents that a step trains on, before they are padded to whole patches."""
    patch = PatchSize(1, 2, 2)
    encoder = Encoder(lambda: None, lambda: None, scale_factor=SCALE, patch=patch)
    return encoder(batch, SlotRandom(0, 0, batch["slots"], 0, "cpu"))[0]


@pytest.mark.parametrize("family", FOLDER)
def test_training_gets_the_batch_of_their_data_set(
    trusting: Run,
    theirs: Theirs,
    family: str,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents and embeddings of their files, which nothing encodes again, and the first frame."""
    config = trusting.of(family).config()
    line = "args.trusted_cache=<...>/cache does not exist; set it"
    assert_refused(lambda: check_cache(config), line)
    folder = theirs(family)
    check_cache(config)
    monkeypatch.setattr(Encoder, "encode_text", lambda *given: pytest.fail("is encoded"))
    encode, encoded = Encoder.encode_moments, []
    count = lambda self, pixels: (encoded.append(pixels.shape), encode(self, pixels))[1]
    monkeypatch.setattr(Encoder, "encode_moments", count)
    cache_latents(config)
    # Two clips show whether the files are of 2B or of 5B. The others have a folder of their own.
    assert encoded == [(1, 3, 9, SIDE, SIDE)] * (2 if family == "5b" else 0)
    assert f"args.trusted_cache={folder}: took 8 files" in log.messages

    batch = batch_of(config)
    stems = [Path(path).stem for path in batch["paths"]]
    assert sorted(stems) == ["0", "1", "2", "3"]
    files = folder / "video_latent" / FOLDER[family]
    expected = torch.stack([load_file(files / f"{s}.safetensors")["encoded_video"] for s in stems])
    torch.testing.assert_close(latents_of(batch), expected, rtol=2e-7, atol=0)
    for text, found in zip(batch["txt"], batch["prompt_embedding"], strict=True):
        name = hashlib.sha256(text.encode()).hexdigest()
        stored = load_file(folder / "prompt_embeddings" / f"{name}.safetensors")
        assert torch.equal(found, stored["prompt_embedding"])
    assert ("images" in batch) == family.endswith("i2v")


def test_missing_and_wrong_files_are_encoded_with_one_warning_each(
    ours: Run, trusting: Run, theirs: Theirs, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A batch may mix both. Without the key, no entry of such a cache is used."""
    folder = theirs(without=(0,))
    files = folder / "video_latent" / FOLDER["5b"]
    of_text = sorted((folder / "prompt_embeddings").iterdir())
    (files / "1.safetensors").write_bytes((files / "1.safetensors").read_bytes()[:-8])
    whole = load_file(files / "2.safetensors")["encoded_video"]
    save_file({"encoded_video": whole[:, :2].contiguous()}, files / "2.safetensors")
    save_file({"prompt_embedding": torch.full((8, 16), torch.nan)}, of_text[0])
    save_file({"prompt_embedding": torch.ones(8, 16, dtype=torch.bfloat16)}, of_text[1])

    config = trusting.config()
    cache_latents(config)
    warnings = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    reasons = [w.split("; it is")[0].split(": ", 1)[1] for w in warnings if ".safetensors" in w]
    header = "Error while deserializing header: incomplete metadata, file not fully covered"
    short = "encoded_video is [8, 2, 4, 4] torch.float32, not [8, 3, 4, 4] torch.float32"
    rounded = "prompt_embedding is [8, 16] torch.bfloat16, not [8, 16] torch.float32"
    wanted = {files / "1.safetensors": header, files / "2.safetensors": short}
    wanted |= {of_text[0]: "prompt_embedding is not finite", of_text[1]: rounded}
    assert sorted(reasons) == sorted(f"{file}: {reason}" for file, reason in wanted.items())
    assert f"args.trusted_cache={folder}: took 2 files" in log.messages
    # One clip of theirs beside three with a variance, which are those of a cache without theirs.
    mixed = latents_of(batch_of(config))
    plain = ours.config()
    line = "by args.trusted_cache True, the config has none: 0 of 4"
    assert_refused(lambda: dataset(plain), line)
    cache_latents(plain)
    batch = batch_of(plain)
    for path, found, other in zip(batch["paths"], mixed, latents_of(batch), strict=True):
        if Path(path).stem == "3":
            other = load_file(files / "3.safetensors")["encoded_video"]
        torch.testing.assert_close(found, other, rtol=2e-7, atol=0)

    # The first run's copies are enough for the second, even if nothing is left of the files.
    shutil.rmtree(folder / "video_latent")
    before = contents(tmp_path / "ours")
    cache_latents(config)
    assert contents(tmp_path / "ours") == before


def test_latents_in_bf16_are_not_rounded_again(trusting: Run, theirs: Theirs) -> None:
    """In a batch with a clip that cogfast has encoded."""
    folder = theirs(without=(0,), dtype=torch.bfloat16)
    config = trusting.config("deepspeed.bf16.enabled=true")
    cache_latents(config)
    batch = batch_of(config)
    for path, found in zip(batch["paths"], latents_of(batch), strict=True):
        if (stem := Path(path).stem) != "0":
            file = folder / "video_latent" / FOLDER["5b"] / f"{stem}.safetensors"
            assert torch.equal(found.bfloat16(), load_file(file)["encoded_video"])


def test_a_stem_that_two_videos_share_is_not_trusted(
    trusting: Run, theirs: Theirs, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder, other = theirs(), tmp_path / "other"
    for part in ("videos/1.mp4", "labels/1.txt"):
        (other / part).parent.mkdir(parents=True)
        shutil.copy(trusting.data / part.replace("1", "2"), other / part)
    cache_latents(trusting.config(f"args.train_data=[{trusting.data},{other}]"))
    assert f"args.trusted_cache={folder}: took 7 files" in log.messages


SCALE_2B = 1.15258426
OTHER_SCALE = (
    "cogvideox-t2v/9x32x32/{}.safetensors has latents of scale 1.<...>, this run has 0.7: CogVideoX-2B "
    "(1.15) and CogVideoX-5B (0.7) have their clips in one folder; remove"
)


def test_files_of_the_other_model_of_a_folder_are_refused(trusting: Run, theirs: Theirs) -> None:
    """Their trainer keeps the clips of 2B and 5B in one folder. A user who changes the model:"""
    theirs(scale=SCALE_2B)
    assert_refused(lambda: cache_latents(trusting.config()), OTHER_SCALE.format(0))
    cache_latents(trusting.of("2b").config(f"model.scale_factor={SCALE_2B}"))


def test_a_file_that_the_other_model_added_is_refused(trusting: Run, theirs: Theirs) -> None:
    """The older files are those of this run's model, the newest is not."""
    files = theirs() / "video_latent" / FOLDER["5b"]
    latents = load_file(files / "2.safetensors")["encoded_video"]
    save_file({"encoded_video": latents / SCALE * SCALE_2B}, files / "2.safetensors")
    # A file system may give files of the same moment one time.
    os.utime(files / "2.safetensors", (time.time() + 10, time.time() + 10))
    assert_refused(lambda: cache_latents(trusting.config()), OTHER_SCALE.format(2))
