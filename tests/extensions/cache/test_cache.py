"""`cogfast cache` and training from what it made, against training from pixels."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cogfast.config import Config
from cogfast.core.slot_random import SlotRandom
from cogfast.data.video.clip import ClipSettings
from cogfast.distributed.process_groups import start_processes
from cogfast.distributed.stop_signals import Interrupted, StopSignals
from cogfast.extensions.cache import cached_data
from cogfast.extensions.cache import command as cache_module
from cogfast.extensions.cache.cached_data import read_from_cache
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.cache.entries import Entries
from cogfast.extensions.cache.entry_keys import hash_file, hash_text
from cogfast.model.autoencoder import Moments, VideoAutoencoder
from cogfast.model.weights.checkpoint_manifest import read_manifest
from cogfast.train.assembly import Datasets
from cogfast.train.encode import Encoder
from cogfast.train.trainer import Trainer
from tests.support.refusals import assert_refused
from tests.support.runs import Run, datasets_of
from tests.support.tiny_run import CHANNELS, assert_same, write_clips, write_clips_with_vae
from tests.support.tiny_run import run as launch
from tests.train.test_encode import noised_by_hand

NUM_CLIPS = 10


class Recorder(Trainer):
    """Keeps what each micro-batch is encoded to, and the files that it was read from."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[list[Tensor]] = []
        self.paths: list[str] = []

    def compute_loss(self, batch: dict) -> Tensor:
        latents, conditioning = self.encoder(batch, self._random(batch))
        self.built = (self.encoder._first_stage, self.encoder._text_encoder)
        given = (latents, conditioning.text, conditioning.condition_latents)
        self.seen.append([x for x in given if x is not None])
        self.paths += batch["paths"]
        return super().compute_loss(batch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips_with_vae(tmp_path_factory.mktemp("data"), NUM_CLIPS, CHANNELS)


@pytest.fixture
def few(few_clips: Path, tmp_path: Path) -> Run:
    """A run on four clips of 17 frames, with the VAE beside them."""
    return Run(few_clips, tmp_path)


@pytest.fixture(scope="module")
def few_clips(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_clips(tmp_path_factory.mktemp("few"), 4)
    shutil.copytree(data / "vae", folder / "vae")
    return folder


def test_existing_caches_stay_valid(run: Run) -> None:
    """Another entry of a spec would make all entries of users useless."""
    config = run.config()
    made = config.run
    described = made.sections, (), made.args, made.model, made.frozen.overrides
    settings = ClipSettings(video_size=(32, 48), fps=8.0, max_num_frames=9)
    for given in (settings, replace(settings, trust_index=True, keep_decoded_mib=9)):
        spec = cached_data.cache_specs(*described, given)["video"]
        del spec["VAE"]
        assert spec == {
            "precision": "fp32",
            "first frames kept": False,
            "data.params.video_size": [32, 48],
            "data.params.fps": 8,
            "data.params.max_num_frames": 9,
            "data.params.skip_frms_num": 0.0,
            "data.params.frame_selection": "timestamp",
            "data.params.short_clips": "skip",
            "data.params.resize": "crop",
            "data.params.video_backend": "pyav",
        }


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        pytest.param("1.5_5b_i2v", [], marks=pytest.mark.soak),
        ("5b", ["data.params.buckets=[[9, 16, 32], [9, 32, 16]]"]),
        ("control", [f"model.network_config.params.in_channels={3 * CHANNELS}"]),
    ],
    ids=["1.5_5b_i2v", "buckets", "control"],
)
def test_training_from_the_cache_is_training_from_pixels(
    family: str, arguments: list[str], run: Run, tmp_path: Path
) -> None:
    """Latents, embeddings and noised images bit for bit, over more than an epoch, the losses, and
    the videos sampled in an evaluation."""
    is_control, has_condition = family == "control", family != "5b"
    run = run.with_vae().of("5b" if is_control else family).with_words(*arguments)
    run = run.with_args(train_iters=3, split="4,1,0", num_workers=1, eval_interval=3).by(Recorder)
    if is_control:
        videos = [str(run.data / f"videos/{i}.mp4") for i in range(NUM_CLIPS)]
        controls = [*videos[1:], videos[0]]
        rows = [
            {"path": path, "caption": f"{i}", "control": control}
            for i, (path, control) in enumerate(zip(videos, controls, strict=True))
        ]
        listed = tmp_path / "clips.jsonl"
        listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # The control of a sample that is trained on is the clip of a held-out one.
        run = run.with_words(
            "model.conditions=[control, frames]",
            "model.given_frames=first_last",
            "model.condition_dropout=0.3",
            f"args.train_data=[{listed}]",
            "data.target=cogfast.data.datasets.VideoManifest",
        )
    cached = run.cached_in(tmp_path / "latents")
    cache_latents(cached.config().run)
    trained = {
        "pixels": run.into(tmp_path / "pixels").train(),
        "cache": cached.into(tmp_path / "cache").train(),
    }
    runs = {name: each.last for name, each in trained.items()}
    assert runs["cache"].paths == runs["pixels"].paths
    assert len(set(runs["cache"].paths)) == 8 and len(runs["cache"].paths) == 12
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert len(found) == (3 if has_condition else 2)
        for tensor, other in zip(found, expected, strict=True):
            assert torch.equal(tensor, other)
    assert trained["cache"].losses == trained["pixels"].losses
    held_out = [[line for line in run.lines if "valid_loss" in line] for run in trained.values()]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 1
    videos = [[*run.path.glob("samples/step-00000003/*.mp4")] for run in trained.values()]
    (one,), (other,) = videos
    assert one.read_bytes() == other.read_bytes()
    # Steps build the VAE for first and given frames alone, the text encoder never.
    assert (runs["cache"].built[0] is None) == (not has_condition)
    assert runs["cache"].encoder._text_encoder is None
    assert None not in runs["pixels"].built


def cached_of(config: Config) -> Datasets:
    """The data sets of a run, read from the cache if it has one."""
    args = config.run.args
    videos = datasets_of(config, args)
    made = config.run
    if args.latent_cache is None:
        return videos
    about = made.sections, made.allow_import, args, made.model, made.frozen.overrides
    return read_from_cache(videos, *about, start_processes())


def contents(folder: Path) -> dict[str, bytes]:
    """The entries of a cache, by their names."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bad")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def videos_in(folder: Path) -> list[str]:
    return [name for name in contents(folder) if name.startswith("video-")]


@pytest.mark.soak
def test_clips_are_encoded_in_the_way_that_fits_and_the_cache_remembers_it(
    few: Run, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """8 frames at a time where whole clips do not fit: latents are diffusers' own, training from the
    cache and from pixels agree, a later run with more memory keeps the way of the cache, and a
    resumed run that of its checkpoint."""
    from diffusers import AutoencoderKLCogVideoX

    run = few.with_vae().of("1.5_5b").with_args(train_iters=1).by(Recorder)
    vae = VideoAutoencoder(few.data / "vae")
    one = vae.limit_encode_memory(1 << 40, (1, 17, 32, 32)).num_bytes
    four = vae.limit_encode_memory(1 << 40, (4, 17, 32, 32)).num_bytes
    ways = {"frames": (one - 1, "8 frames at a time"), "whole": (four - 1, "whole, one by one")}
    limits = {n: f"args.vae_memory_gib={num_bytes / 2**30!r}" for n, (num_bytes, _) in ways.items()}
    for name, (_, way) in ways.items():
        cache_latents(run.cached_in(tmp_path / name).config(limits[name]).run)
        assert f"clips of 17x32x32 are encoded {way}" in log.text
        (file,) = (tmp_path / name).glob("video-*/spec.json")
        assert json.loads(file.read_text())["encode_chunks"] == name
    before, cached = contents(tmp_path / "frames"), run.cached_in(tmp_path / "frames")

    pixels = run.into(tmp_path / "pixels").train(limits["frames"])
    cache = cached.into(tmp_path / "cache").train()
    for found, expected in zip(cache.last.seen, pixels.last.seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    clip = cached_of(run.config()).train[0]["video"].float() / 127.5 - 1
    theirs = AutoencoderKLCogVideoX.from_pretrained(few.data / "vae")
    with torch.no_grad():
        expected = theirs.encode(clip.transpose(0, 1)[None]).latent_dist.mean[0]
    found = cached_of(cached.config()).train[0]["latent_mean"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    # All entries are there: nothing is loaded, whatever fits now.
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(cached.config().run)
    # Missing ones are encoded as the others were.
    (tmp_path / "frames" / videos_in(tmp_path / "frames")[-1]).unlink()
    cache_latents(cached.config().run)
    assert contents(tmp_path / "frames") == before
    # A way that no longer fits is kept all the same, unless another one is asked for.
    (tmp_path / "whole" / videos_in(tmp_path / "whole")[-1]).unlink()
    small = run.cached_in(tmp_path / "whole").config(limits["frames"])
    line = "encode_chunks=whole to try it, or =frames to encode all clips again"
    assert_refused(lambda: cache_latents(small.run), line)
    assert read_manifest(cache.checkpoint)["encode_way"] == ("frames", True)
    tiles = cached.config("model.first_stage_config.params.encode_chunks=tiles")
    line = "cache made by encode_chunks frames, the config has tiles"
    assert_refused(lambda: cached_of(tiles), line)

    log.clear()
    run.by(Trainer).train("args.accept_changes=true", f"args.resume={pixels.path}", steps=2)
    assert "clips of 17x32x32 are encoded 8 frames at a time" in log.text


def test_the_key_of_an_encoder_has_the_folder_that_it_reads(tmp_path: Path) -> None:
    """A folder of T5 with its weights in the root, and one of its two parts, is no pipeline."""
    (tmp_path / "tokenizer").mkdir()
    keys = set()
    for weights in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(weights * 9)
        keys.add(str(cached_data._folder("text encoder", str(tmp_path))))
        (tmp_path / "model.safetensors").unlink()
    assert len(keys) == 2


def test_encoding_first_trains_as_from_a_cache_that_was_there(
    few: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command leaves the cache and weights of two bit for bit, also if interrupted; nothing is built if the
    cache is complete."""
    run, asked = few.with_args(train_iters=2), "args.encode_first=true"
    before = run.cached_in(tmp_path / "before").into(tmp_path / "two commands")
    first = run.cached_in(tmp_path / "first").into(tmp_path / "one command").with_words(asked)
    cache_latents(before.config().run)
    expected = before.train().weights()

    def interrupt(*args: object) -> None:
        raise Interrupted

    # The captions are encoded, the clips are not.
    with StopSignals(lambda reason: reason, kept="; nothing") as signals:
        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(cache_module, "encode_clips", interrupt)
            first.into(tmp_path / "interrupted").train()
        assert signals.kept.startswith("; the entries that are complete are kept in")
        signals.kept = "; nothing"
        assert len(contents(tmp_path / "first")) == 4 and not videos_in(tmp_path / "first")
        done = first.train()
        assert signals.kept == "; nothing"
    assert contents(tmp_path / "first") == contents(tmp_path / "before")
    assert done.last.encoder._first_stage is None and done.last.encoder._text_encoder is None
    assert_same(done.weights(), expected)

    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        first.trainer()
    line = f"{asked} applies to a latent cache, but <...> is not set"
    assert_refused(lambda: run.trainer(asked), line)


def test_a_folder_that_cannot_be_created_is_refused_before_clips_are_encoded(
    few: Run, tmp_path: Path
) -> None:
    """In /proc, root may write by its permissions, and only mkdir shows that no user can."""
    first = few.cached_in(tmp_path / "first").with_words("args.encode_first=true")
    for key in ("run_folder", "save"):
        word = f"args.{key}=/proc/none/out"
        line = f"{word}: cannot be created <...>; set it to another folder"
        assert_refused(lambda word=word: first.trainer(word), line)
    assert not (tmp_path / "first").exists()


@pytest.mark.slow
def test_ranks_that_share_samples_encode_first(few: Run, tmp_path: Path) -> None:
    """Each encodes clips of its own, though they train on the same ones."""
    run = few.with_args(train_iters=1)
    cache_latents(run.cached_in(tmp_path / "before").config().run)
    words = ["args.encode_first=true", "args.context_parallel_size=2"]
    run.cached_in(tmp_path / "first").launch(2, *words)
    assert contents(tmp_path / "first") == contents(tmp_path / "before")


def test_noised_images_of_the_cache_are_the_encoders(run: Run, tmp_path: Path) -> None:
    """Latents of the VAE itself for the same noise; neither training nor the held-out loss builds
    it, and the videos of an evaluation begin with the frame without noise."""
    from diffusers import AutoencoderKLCogVideoX

    run = run.with_vae().of("1.5_5b_i2v").by(Recorder)
    run = run.with_args(train_iters=3, split="4,1,0", eval_interval=3, eval_num_samples=0)
    cached = run.cached_in(tmp_path / "cache").with_words("model.noised_image_dropout=0")
    config = cached.config("args.cached_noised_images=3")
    cache_latents(config.run)
    with patch.object(VideoAutoencoder, "__init__", side_effect=AssertionError):
        trainer = Recorder(config)
        trainer.train()
    assert trainer.built == (None, None)
    assert '"valid_loss"' in (trainer.folder / "metrics.jsonl").read_text()

    videos = datasets_of(run.config())
    frames = {
        name: item["video"][0] for name, item in zip(videos.train.paths, videos.train, strict=True)
    }
    vae, num_drawn = AutoencoderKLCogVideoX.from_pretrained(run.data / "vae"), Counter()
    for step, (_, _, image) in enumerate(trainer.seen):
        rng = SlotRandom(config.args.seed, step, range(4), 4)
        noise = rng.normal("image_first_stage", (4, CHANNELS, 1, 4, 4))
        for slot, path in enumerate(trainer.paths[4 * step : 4 * step + 4]):
            key = hash_text(json.dumps([hash_file(path), {}]))
            noised = [noised_by_hand(frames[path], key, i) for i in range(3)]
            posterior = vae.encode(torch.stack(noised)).latent_dist
            wanted = 0.7 * (posterior.mean + posterior.std * noise[slot])
            errors = (image[slot, :, :1] - wanted).abs().flatten(1).amax(dim=1)
            assert errors.min() < 1e-5 and errors.max() > 1e-3
            num_drawn[int(errors.argmin())] += 1
    assert set(num_drawn) == {0, 1, 2}

    evaluator = trainer.evaluator
    evaluator.args = trainer.args.changed(eval_num_samples=2)
    shown = [prompt.image for prompt in evaluator._prompts(trainer.parts.size.latents, "")]
    unit = [video["video"][0] / 127.5 - 1 for video in (videos.valid[0], videos.valid[1])]
    torch.testing.assert_close(shown, unit, rtol=0, atol=1e-6)

    before, plain = contents(tmp_path / "cache"), cached.config()
    line = (
        "cache made by first frames kept False, the config has True; cache made by "
        "args.cached_noised_images 3, the config has none: 0 of 10 usable; run `cogfast cache`"
    )
    assert_refused(lambda: cached_of(plain), line)
    cache_latents(plain.run)
    assert before.items() <= contents(tmp_path / "cache").items()
    for both in (config, plain):
        cached_of(both)


def test_only_changed_clips_are_encoded_again(
    data: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    config = Run(clips, tmp_path).with_vae().cached_in(cache).config()
    cache_latents(config.run)
    before = contents(cache)
    shutil.copy(clips / "videos" / "1.mp4", clips / "videos" / "0.mp4")  # both are the same now
    shutil.copy(data / "videos" / "2.mp4", clips / "videos" / "other.mp4")
    (clips / "videos" / "2.mp4").write_bytes((data / "videos" / "2.mp4").read_bytes() + b"\0" * 8)
    (clips / "videos" / "3.mp4").touch()
    for name in ("2", "other"):
        (clips / "labels" / f"{name}.txt").write_text("another caption")
    line = "videos changed or moved since caching: 7 of 11 usable; run `cog"
    assert_refused(lambda: Trainer(config), line)
    log.clear()
    cache_latents(config.run)
    # 0 and 1 are the same now, and so are 2's caption and that of the copy of the old 2.
    assert f"{cache}: encoding 1 of 10 clips and 1 of 10 captions" in log.text
    assert f"{cache}: 11 samples, 0 bad" in log.text
    after = contents(cache)
    assert before.items() <= after.items() and len(after) == len(before) + 2
    # If nothing is missing, no frozen part is built.
    config.model.first_stage_config.params.use_slicing = True  # changes no number
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(config.run)
    assert contents(cache) == after


def test_weights_are_hashed_once(data: Path, tmp_path: Path, monkeypatch) -> None:
    """The weights of T5 have 10 GB. A file that changes is read again."""
    read: list[str] = []
    monkeypatch.setattr(cached_data, "hash_file", lambda path: read.append(path) or hash_file(path))
    weights = tmp_path / "model.safetensors"
    for content in (b"weights", b"others"):
        weights.write_bytes(content)
        found = {cached_data._described("VAE", str(weights)) for _ in range(2)}
        assert found == {hash_file(str(weights))}
    assert read == [str(weights)] * 2


def test_another_vae_or_text_encoder_is_refused_with_counts(run: Run, tmp_path: Path) -> None:
    cached = run.cached_in(tmp_path / "cache")
    cache_latents(cached.config().run)
    seed = "model.conditioner_config.params.emb_models[0].params.seed=1"
    others = {
        "VAE": cached.with_vae(),
        "text encoder": cached.with_words(seed),
        "data.params.fps": cached.with_words("data.params.fps=4"),
    }
    for what, other in others.items():
        line = (
            f"cache made by {what} <...>, the config has <...>: 0 of 10 usable; run `cogfast cache`"
        )
        assert_refused(other.trainer, line)


def test_bad_samples_are_listed_and_passed_over(data: Path, tmp_path: Path) -> None:
    """Samples with non-finite latents of the clip or its image, and a video that ends early."""
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    torn = clips / "videos" / "5.mp4"
    torn.write_bytes(torn.read_bytes()[:600])
    run = Run(clips, tmp_path).of("5b_i2v").cached_in(cache)
    run = run.with_args(max_bad_fraction=0.4, train_iters=5, cached_noised_images=1)
    config = run.config()
    encode_moments, num_calls = Encoder.encode_moments, 0

    def spoil(encoder: Encoder, pixels: Tensor) -> Moments:
        nonlocal num_calls
        num_calls += 1
        moments = encode_moments(encoder, pixels)
        if num_calls in (2, 3):  # the images of four clips, the next four clips
            moments.mean[0, 0, 0, 0, 0] = float("inf")
        return moments

    with patch.object(Encoder, "encode_moments", spoil):
        cache_latents(config.run)
    bad = sorted(cache.rglob("*.bad"))
    reasons = sorted(path.read_text() for path in bad)
    assert reasons[0].startswith("its latents are not finite") and len(reasons) == 3
    assert reasons[2].startswith("not a readable video")
    before = contents(cache)
    cache_latents(config.run)
    assert contents(cache) == before
    trainer = Recorder(config)
    trainer.train()
    assert len(set(trainer.paths)) == NUM_CLIPS - 3 and str(torn) not in trainer.paths
    listed = (trainer.folder / "bad_samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["reason"] for line in listed) == reasons
    # A listing of NFS may lack what other machines have just written.
    with patch.object(Entries, "keys", lambda *_: {}):
        assert len(Recorder(config).datasets.train) == NUM_CLIPS
    # One that is deleted is tried again, and is still bad.
    next(path for path in bad if "readable" in path.read_text()).unlink()
    cache_latents(config.run)
    assert contents(cache) == before
    config.args.max_bad_fraction = 0.2
    line = "3/10 videos unreadable (>20%), args.max_bad_fraction"
    assert_refused(lambda: cache_latents(config.run), line)


def test_a_real_full_disk_costs_no_entry(run: Run, tmp_path: Path, file_limit) -> None:
    """The disk fills at the captions and at the clips; what is written stays."""
    cache, straight = tmp_path / "cache", tmp_path / "straight"
    config = run.cached_in(cache).config()
    cache_latents(run.cached_in(straight).config().run)
    cache.mkdir()
    shutil.copy(straight / "sources.jsonl", cache)  # larger than an entry of this model
    for limit, kind, number in ((600, "text", 0), (1_400, "video", NUM_CLIPS)):
        expected = rf"^args.latent_cache: .*/{kind}-\S* cannot be written \(File too large\); what "
        with file_limit(limit), pytest.raises(RuntimeError, match=expected):
            cache_latents(config.run)
        assert len(contents(cache)) == number
        assert not list(cache.rglob("*.incomplete"))
    cache_latents(config.run)
    assert contents(cache) == contents(straight)
    base = run.base
    done = launch(run.cached_in(base).command(name="cache"))
    assert done.returncode == 2
    expected = f"{base}/write_test cannot be written (File exists); use another folder or free disk"
    assert done.stdout.splitlines()[-1].startswith(f"cogfast: args.latent_cache: {expected}")
