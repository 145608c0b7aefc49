"""Classes of a user that override encode_video, encode_text and collate_fn, as upstream's users do."""

from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from cogfast.core.slot_random import SlotRandom
from cogfast.finetune import Args, CogVideoXT2VLoraTrainer, get_model_cls
from cogfast.finetune.overrides import check_collated, check_encoded, identity, overridden
from tests.support.refusals import assert_refused
from tests.support.tiny_run import losses

LENGTH = 226  # rows of text of CogVideoX 1.0


def clip_of(file: Path) -> Tensor:
    """Upstream's frames of a clip of this size, range(0, n, n // F)[:F], as [1, 3, F, H, W] in [-1, 1]."""
    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    chosen = np.stack(frames[:: len(frames) // 9][:9])
    return torch.from_numpy(chosen).permute(3, 0, 1, 2)[None].float() / 255 * 2 - 1


class Theirs:
    """The encoders of upstream's classes, from diffusers and transformers alone."""

    def __init__(self, folder: Path) -> None:
        self.vae = AutoencoderKLCogVideoX.from_pretrained(folder / "vae")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.text_encoder = T5EncoderModel.from_pretrained(folder / "text_encoder")

    @torch.no_grad()
    def latents(self, video: Tensor) -> Tensor:
        # Twice the mean, which cogfast's own encoder never returns.
        return self.vae.encode(video).latent_dist.mode() * 2 * self.vae.config.scaling_factor

    @torch.no_grad()
    def embedding(self, prompt: str) -> Tensor:
        given = {"padding": "max_length", "max_length": LENGTH, "truncation": True}
        ids = self.tokenizer(prompt, **given, add_special_tokens=True, return_tensors="pt")
        return self.text_encoder(ids.input_ids)[0] + 1


theirs = cache(Theirs)


class Mine(CogVideoXT2VLoraTrainer):
    """Overrides all four with diffusers' modules, and records what it is given."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.calls, self.batches = [], []
        self.own = theirs(args.model_path)

    def encode_video(self, video: Tensor) -> Tensor:
        self.calls.append(video.clone())
        return self.own.latents(video)

    def encode_text(self, prompt: str) -> Tensor:
        self.calls.append(prompt)
        assert self.state.transformer_config.max_text_seq_length == LENGTH
        return self.own.embedding("a prefix " + prompt)

    def collate_fn(self, samples: list[dict]) -> dict:
        for sample in samples:
            size = {"num_frames": 3, "height": 4, "width": 6}
            assert sample["video_metadata"] == size
            assert sample["encoded_video"].shape == (16, *size.values())
            further = {"video_metadata", "path", "prompt"}
            assert sample.keys() == {"encoded_video", "prompt_embedding"} | further
            assert sample["prompt"] == f"a red block, number {Path(sample['path']).stem}"
        batch = super().collate_fn(samples)
        # Upstream's users turn or weigh samples here.
        return batch | {"encoded_videos": batch["encoded_videos"].flip(-1), "weight": 3.0}

    def compute_loss(self, batch: dict) -> Tensor:
        self.batches.append(batch)
        return super().compute_loss(batch) * batch["weight"]


class Changed(Mine):
    def encode_text(self, prompt: str) -> Tensor:
        return 2 * super().encode_text(prompt)


def test_overridden_methods_get_and_give_what_upstreams_do(run_options, data, pipelines):
    """Frames, latents and embeddings are those of diffusers' modules on upstream's frames."""
    own = theirs(pipelines.path("5b"))
    clips = [clip_of(data / "videos" / f"{i}.mp4") for i in range(4)]
    captions = [f"a red block, number {i}" for i in range(4)]
    trainer = Mine(Args(**run_options("5b", train_steps=2, batch_size=2)))
    trainer.fit()
    videos = [call for call in trainer.calls if isinstance(call, Tensor)]
    prompts = [call for call in trainer.calls if isinstance(call, str)]
    # One clip and one caption a call; all of them, and each once: 2 steps of 2 are an epoch.
    assert sorted(prompts) == captions and len(videos) == 4
    for video in videos:
        assert video.dtype == torch.float32
        assert min((video - clip).abs().max() for clip in clips) < 1e-6
    assert len(trainer.batches) == 2
    seen = []
    for batch in trainer.batches:
        for latent, text in zip(batch["encoded_videos"], batch["prompt_embedding"], strict=True):
            errors = [(latent.flip(-1) - own.latents(clip)[0]).abs().max() for clip in clips]
            seen.append(int(np.argmin(errors)))
            assert errors[seen[-1]] < 1e-5
            expected = own.embedding("a prefix " + captions[seen[-1]])[0]
            assert (text - expected).abs().max() < 1e-5
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.soak
def test_the_cache_notices_another_method(run_options, data, tmp_path):
    """Entries of one class serve its later runs, and neither another class nor cogfast's own."""
    given = run_options("5b", latent_cache=str(tmp_path / "cache"))
    entries = {}
    for name, kind in (("first", Mine), ("changed", Changed)):
        trainer = kind(Args(**given | {"output_dir": tmp_path / name}))
        run = trainer._prepare()
        videos = sum(isinstance(call, Tensor) for call in trainer.calls)
        texts = sum(isinstance(call, str) for call in trainer.calls)
        assert (videos, texts) == {"first": (4, 4), "changed": (0, 4)}[name]
        entries[name] = [run.datasets.train[i] for i in range(4)]
    for one, changed in zip(*entries.values(), strict=True):
        assert torch.equal(one["latent_mean"], changed["latent_mean"])
        assert torch.equal(2 * one["prompt_embedding"], changed["prompt_embedding"])
    plain = CogVideoXT2VLoraTrainer(Args(**given | {"output_dir": tmp_path / "plain"}))
    dataset = plain._prepare().datasets.train
    assert not torch.equal(dataset[0]["latent_mean"], entries["first"][0]["latent_mean"])
    assert not torch.equal(dataset[0]["prompt_embedding"], entries["first"][0]["prompt_embedding"])


def test_a_methods_identity_has_the_source_of_its_parents():
    functions = overridden(Changed, CogVideoXT2VLoraTrainer)["encode_text"]
    assert len(functions) > 1, "Changed has a parent whose method it calls"
    found = {identity(Changed, "encode_text", functions[:n]) for n in (1, len(functions))}
    assert len(found) == 2


def test_methods_that_call_their_parent_change_nothing(run_options, tmp_path):
    """Losses are those of a class without them, and random operations depend on the step alone.

    compute_loss gets upstream's keys.
    """
    trainer = get_model_cls("cogvideox1.5-i2v", "lora")

    class Same(trainer):
        def encode_video(self, video: Tensor) -> Tensor:
            assert (*video.shape, video.dtype) == (1, 3, 17, 32, 48, torch.float32)
            torch.randn(3)
            return super().encode_video(video)

        def encode_text(self, prompt: str) -> Tensor:
            return super().encode_text(prompt)

        def collate_fn(self, samples: list[dict]) -> dict:
            assert samples[0]["image"].shape == (3, 32, 48)
            assert samples[0]["image"].abs().max() <= 1
            return super().collate_fn(samples) | {"draw": torch.randn(2)}

        def compute_loss(self, batch: dict) -> Tensor:
            assert not {"mp4", "latent_mean", "latent_logvar"} & batch.keys()
            assert batch["encoded_videos"].shape == (1, 16, 5, 4, 6)
            assert batch["prompt_embedding"].shape == (1, 224, 32)
            assert batch["images"].shape == (1, 3, 32, 48) and batch["images"].abs().max() <= 1
            return super().compute_loss(batch)

    given = run_options(
        "1.5_5b_i2v", train_steps=2, learning_rate=1e-2, lr_warmup_steps=0, latent_cache="none"
    )
    trainer(Args(**given)).fit()
    same = Same(Args(**given | {"output_dir": tmp_path / "same"}))
    same.fit()
    assert losses(tmp_path / "same") == losses(tmp_path / "out")
    run = same._prepare()
    batch = run.datasets.train[0]
    latents = torch.zeros(1, 16, 5, 4, 6)
    encoded = {"encoded_videos": latents, "prompt_embedding": torch.zeros(1, 224, 32)}
    encoded["images"] = torch.zeros(1, 3, 32, 48)
    draws = []
    for step in (0, 1, 0):
        torch.manual_seed(len(draws))
        draws.append(run._collate(encoded, SlotRandom(42, step, [0], 1))["draw"])
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
    # Outside of an encoding, the run's encoders answer.
    assert same.encode_text(batch["txt"]).shape == (1, 224, 32)


def test_a_wrong_result_ends_the_run_in_one_line(run_options):
    encode = {"encode_video": lambda self, given: torch.zeros(1, 16, 3, 4, 5)}
    mine = type("Mine", (CogVideoXT2VLoraTrainer,), encode)
    line = (
        "Mine.encode_video returned torch.float32 [1, 16, 3, 4, 5]; return floats [1, 16, 3, 4, 6]"
    )
    assert_refused(lambda: mine(Args(**run_options("5b", latent_cache="none"))).fit(), line)
    line = "encode_text returned a NoneType; return floats [1, 2]"
    assert_refused(lambda: check_encoded("Mine.encode_text", None, (1, 2)), line)
    samples = [{"encoded_video": torch.zeros(2), "prompt_embedding": torch.zeros(2)}] * 2
    batch = {"encoded_videos": torch.zeros(2, 2), "prompt_embedding": torch.zeros(2, 2)}
    assert check_collated("Mine.collate_fn", batch, samples, False) is batch
    few = batch | {"encoded_videos": torch.zeros(1, 2)}
    # A loss of the user's own may take them.
    assert check_collated("Mine.collate_fn", few, samples, True) is few
    shape = "returned torch.float32 [1, 2] as encoded_videos; return a tensor of all 2 samples"
    none = "returned a NoneType as encoded_videos; return a tensor"
    for wrong, line in (
        ([], "returned a list; return a dict"),
        (few, shape),
        (batch | {"encoded_videos": None}, none),
    ):
        call = lambda wrong=wrong: check_collated("Mine.collate_fn", wrong, samples, False)
        assert_refused(call, f"Mine.collate_fn {line}")


def test_a_method_without_source_is_refused_for_a_cache(run_options, monkeypatch):
    monkeypatch.setattr("cogfast.train.phases.start_processes", None)  # checks come before
    source = "class Typed(Base):\n    def encode_text(self, prompt):\n        return None\n"
    names = {"Base": CogVideoXT2VLoraTrainer, "__name__": "typed"}
    exec(compile(source, "<typed>", "exec"), names)
    message = "Typed.encode_text: its source cannot be read, .* or set latent_cache to none"
    with pytest.raises(ValueError, match=message):
        names["Typed"](Args(**run_options("5b"))).fit()
