"""Evaluation during training: held-out loss by band, sampled videos, and failures, which do not end it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cogfast.__main__ import main
from cogfast.core.slot_random import SlotRandom
from cogfast.data.global_order import GlobalOrder
from cogfast.data.video.reader import open_video
from cogfast.diffusion.denoiser import Conditioning
from cogfast.extensions.sample.evaluate import Evaluator
from cogfast.extensions.sample.generate import VideoMaker
from cogfast.train.trainer import Trainer
from tests.support.runs import Run, datasets_of
from tests.support.tiny_run import CHANNELS, write_clips
from tests.support.video_files import decode_all
from tests.train.test_trainer import ENCODED


@pytest.fixture
def run(run: Run, data: Path) -> Run:
    return run.with_args(valid_data=[str(data)], eval_interval=2, train_iters=2)


def samples(run: Run, step: int = 2) -> Path:
    return run.path / "samples" / f"step-{step:08d}"


def hand_computed(trainer: Trainer, num_samples: int) -> list[float]:
    """The loss at the middle of each of 4 bands over the first held-out samples, one at a time."""
    dataset, encoder, loss_fn = trainer.datasets.valid, trainer.encoder, trainer.diffusion.loss
    transformer = trainer.engine.transformer
    order = GlobalOrder(len(dataset), 0, 4)
    bands = torch.zeros(4, dtype=torch.float64)
    for place in range(num_samples):
        item = dataset[order.index(*divmod(place, 4))]
        rng = SlotRandom(0, 0, [place], 0)
        video = item["video"].float().sub(127.5).div(127.5).transpose(0, 1)[None]
        x0 = 0.7 * encoder.first_stage.encode(video).mean
        image = None
        if encoder.image_input:
            sigma = torch.exp(-3 + 0.5 * rng.normal("image_noise_strength", (1, 1, 1, 1, 1)))
            frame = video[:, :, :1] + sigma * rng.normal("image_noise", (1, 3, 1, 32, 32))
            x0 = torch.cat([x0[:, :, :1], x0], dim=2)  # 3 latent frames of 1.5 become 4, 5 become 6
            image = torch.zeros_like(x0)
            image[:, :, :1] = 0.7 * encoder.first_stage.encode(frame).mean
        noise = rng.normal("held-out noise", x0.shape).double()
        for band, middle in enumerate((125, 375, 625, 875)):
            idx = torch.tensor([middle])
            a = loss_fn.sigma_sampler.alpha_sqrt(idx).double()
            noised = a * x0.double() + (1 - a**2).sqrt() * noise
            text = encoder.text_encoder([item["txt"]])
            with torch.no_grad():
                v = transformer(noised.float(), idx, text, condition_latents=image).double()
            # The video loss weighs the error of x0 with 1 / (1 - a^2): that of v, unweighted.
            bands[band] += (v - (a * noise - (1 - a**2).sqrt() * x0.double())).square().mean()
    return (bands / num_samples).tolist()


@pytest.mark.parametrize("family", ["5b", "1.5_5b_i2v"])
def test_held_out_loss_is_the_formula_at_band_middles(run: Run, family: str) -> None:
    run = run.of(family).with_args(eval_with_ema=False, eval_num_samples=0)
    trainer = run.trainer("data.params.max_num_frames=9")
    transformer = trainer.engine.transformer
    found = trainer.evaluator(0, trainer.parts.size.latents)
    wanted = hand_computed(trainer, 4)
    bands = [found[f"valid_loss_band_{i}"] for i in range(4)]
    torch.testing.assert_close(bands, wanted, rtol=1e-5, atol=0)
    assert found["valid_loss"] == pytest.approx(sum(wanted) / 4, rel=1e-5)
    assert trainer.evaluator(7, trainer.parts.size.latents) == found
    assert transformer.training
    if family == "5b":  # args.elastic: the samples of any division of the global batch
        args = trainer.args.changed(elastic="shrink", batch_size=2, gradient_accumulation_steps=2)
        of_run = (trainer.engine, trainer.diffusion, trainer.encoder, trainer.datasets.valid)
        divided = Evaluator(*of_run, args, trainer.groups, trainer.folder)
        again = divided(0, trainer.parts.size.latents)
        assert again == pytest.approx(found, rel=1e-5)


def test_strict_evaluation_takes_every_sample_once(run: Run) -> None:
    """Six clips in batches of four: the second batch begins the next round, which must not count."""
    run = run.with_args(eval_with_ema=False, eval_num_samples=0, eval_iters=1)
    trainer = run.trainer("args.strict_eval=true")
    found = trainer.evaluator(0, trainer.parts.size.latents)
    bands = [found[f"valid_loss_band_{i}"] for i in range(4)]
    torch.testing.assert_close(bands, hand_computed(trainer, 6), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("weights", "strict", "length"), [(3, "false", 9), (3, "true", 3), (0.5, "true", 3)]
)
def test_weights_of_training_do_not_count_in_a_strict_evaluation(
    run: Run, weights: float, strict: str, length: int
) -> None:
    words = (f"args.train_data_weights=[{weights}]", f"args.strict_eval={strict}")
    config = run.with_args(valid_data=None, split="1,1").config(*words)
    found = datasets_of(config, config.run.args)
    assert found.valid.order(0, 1).epoch_size == length == len(found.valid) * length / 3
    assert found.train.order(0, 1).epoch_size == round(3 * weights)


def test_evaluating_changes_no_training_number(run: Run, tmp_path: Path) -> None:
    found = run.into(tmp_path / "with").train(steps=4)
    wanted = run.into(tmp_path / "without").train("args.eval_interval=null", steps=4)
    assert found.losses == wanted.losses


@pytest.mark.parametrize("with_ema", [True, False], ids=["ema", "current"])
def test_samples_come_from_the_weights_asked_for(run: Run, with_ema: bool) -> None:
    """An evaluation's samples equal those of a sampler run by hand on those weights."""
    run = run.with_args(eval_with_ema=with_ema, eval_prompts=["a bar moves", "another one"])
    run = run.with_args(only_log_video_latents=True, eval_sampling_steps=2)
    run = run.train("deepspeed.optimizer.params.lr=0.05")
    trainer = run.last
    names = json.loads((samples(run) / "prompts.json").read_text())
    assert list(names.values()) == ["a bar moves", "another one"]
    assert all(name.endswith(".safetensors") for name in names)
    assert not (samples(run) / "contact_sheet.png").exists()

    encoder = trainer.encoder
    generated = {}
    for kind in ("shadow", "master"):
        trainer.engine.transformer.eval()
        with trainer.engine.weights(kind), torch.no_grad():
            rng = SlotRandom(0, 0, [0, 1], 0)
            text = encoder.text_encoder(["a bar moves", "another one"])
            # Only the first of two steps adds noise, drawn once.
            generated[kind] = trainer.diffusion.sampler.with_num_steps(2)(
                trainer.diffusion.denoiser,
                trainer.engine.transformer,
                rng.normal("sample", (2, CHANNELS, 3, 4, 4)),
                Conditioning(text),
                Conditioning(torch.zeros_like(text)),
                lambda x, rng=rng: rng.normal("sampler step 1", x.shape),
            )
    written = torch.stack([load_file(samples(run) / name)["latents"] for name in names])
    same, other = ("shadow", "master") if with_ema else ("master", "shadow")
    torch.testing.assert_close(written, generated[same], rtol=0, atol=1e-5)
    assert not torch.allclose(written, generated[other], rtol=0, atol=1e-3)


def test_image_to_video_samples_the_given_images(run: Run, tmp_path: Path) -> None:
    """No held-out data are needed: the latents equal those of a sampler run by hand on the pictures."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for name, picture in zip("ab", pixels, strict=True):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.txt").write_text("a bar moves\nanother one\n")
    (tmp_path / "images.txt").write_text("a.png\nb.png\n")
    run = run.of("5b_i2v").with_args(valid_data=[], eval_with_ema=False, eval_sampling_steps=2)
    lists = {"eval_prompt_file": "prompts.txt", "eval_images": "images.txt"}
    run = run.with_args(**{key: str(tmp_path / name) for key, name in lists.items()})
    run = run.with_args(only_log_video_latents=True)
    trainer = run.trainer("data.params.resize=stretch")
    trainer.evaluator(2, trainer.parts.size.latents)
    names = json.loads((samples(run) / "prompts.json").read_text())
    assert list(names.values()) == ["a bar moves", "another one"]
    written = torch.stack([load_file(samples(run) / name)["latents"] for name in names])

    encoder = trainer.encoder
    with torch.no_grad():
        rng = SlotRandom(0, 0, [0, 1], 0)
        text = encoder.text_encoder(["a bar moves", "another one"])
        frames = torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1
        image = torch.zeros(2, CHANNELS, 3, 4, 4)
        image[:, :, :1] = 0.7 * encoder.first_stage.encode(frames).mean
        wanted = trainer.diffusion.sampler.with_num_steps(2)(
            trainer.diffusion.denoiser,
            trainer.engine.transformer.eval(),
            rng.normal("sample", (2, CHANNELS, 3, 4, 4)),
            Conditioning(text, image),
            Conditioning(torch.zeros_like(text), image),
            lambda x: rng.normal("sampler step 1", x.shape),
        )
    torch.testing.assert_close(written, wanted, rtol=0, atol=1e-5)
    trainer.evaluator(4, trainer.parts.size.latents)
    again = [load_file(samples(run, 4) / name)["latents"] for name in names]
    assert torch.equal(torch.stack(again), written)

    # White in the first quarter, which a crop to the middle would cut off.
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, :16] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    found = trainer.evaluator._image(tmp_path / "wide.png", trainer.parts.size.latents)
    assert found.shape == (3, 32, 32)
    assert found[:, :, :7].min() > 0.99 and found[:, :, 9:].max() < -0.99


def test_videos_have_the_frames_of_the_data(run: Run) -> None:
    """Captions and first frames of the held-out clips; padding frames are dropped."""
    options = {"eval_num_samples": 2, "eval_sampling_steps": 2, "sampling_fps": 24}
    run = run.of("1.5_5b_i2v").with_args(**options).train()
    names = json.loads((samples(run) / "prompts.json").read_text())
    assert list(names.values()) == ["bar number 0 moves", "bar number 3 moves"]
    for name in names:
        video = open_video(str(samples(run) / name))
        assert len(video) == 17
        assert video.fps == pytest.approx(24)
        video.close()
    assert (samples(run) / "contact_sheet.png").stat().st_size > 1000


def test_an_evaluation_uses_the_negative_prompt_as_sampling_does(run: Run, tmp_path: Path) -> None:
    options = {"eval_prompts": ["a bar"], "only_log_video_latents": True, "negative_prompt": "dim"}
    # The rate is high: after two small steps the text still changes nothing.
    run = run.with_args(**options).train("args.lr=0.05")
    (of_run,) = (load_file(path)["latents"] for path in samples(run).glob("*.safetensors"))
    found = {}
    for name, words in {"dim": [], "none": ["args.negative_prompt=null"]}.items():
        out = tmp_path / name
        given = ["--prompt", "a bar", "--seed", "0", "args.only_save_latents=true", *words]
        assert main(["sample", str(run.path), "--out", str(out), *given]) == 0
        (found[name],) = (load_file(path)["latents"] for path in out.glob("*.safetensors"))
    differences = {name: float((of_run - one).abs().max()) for name, one in found.items()}
    assert differences["dim"] < 1e-6 and differences["none"] > 1e-4


def test_encoded_data_is_sampled_from_its_embeddings(run: Run) -> None:
    """Two latent frames: 5 pixel frames, fewer than the model's table holds. No T5 is loaded."""
    given = {"dataset": {"target": ENCODED, "params": {"num_frames": 2}}, "eval_sampling_steps": 2}
    given |= {"valid_data": ["anything"], "train_data": ["anything"]}
    run = run.of("1.5_5b_i2v").by(Trainer, "tests").with_args(**given).train()
    assert run.last.encoder._text_encoder is None
    (name,) = json.loads((samples(run) / "prompts.json").read_text())
    assert len(decode_all(samples(run) / name)) == 5


def test_the_last_step_is_evaluated_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed at its end evaluates it: a kill may have ended that evaluation."""
    evaluated = []
    monkeypatch.setattr(Evaluator, "__call__", lambda self, step, *_: evaluated.append(step) or {})
    run.train("args.eval_at_end=true")
    assert evaluated == [2]
    run.resume("args.eval_at_end=true", "args.eval_interval=3")
    assert evaluated == [2, 2]


WANDB = """
from pathlib import Path
received = []
class Video:
    def __init__(self, path, caption, format):
        self.given = (Path(path).read_bytes()[4:8], caption, format)
class Run:
    define_metric = lambda self, *given, **named: None
    def log(self, values):
        if "samples" in values:
            received.append((values["step"], [video.given for video in values["samples"]]))
    def finish(self, exit_code):
        received.append(exit_code)
def init(**named):
    return Run()
"""


def test_videos_reach_wandb(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt fails; those that were written are logged. wandb is a stand-in that records."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "stub")
    condition = VideoMaker.condition

    def fail_once(self: VideoMaker, prompts: list) -> Conditioning:
        if prompts[0].text == "no":
            raise torch.OutOfMemoryError("out of memory")
        return condition(self, prompts)

    monkeypatch.setattr(VideoMaker, "condition", fail_once)
    prompts = ["a bar moves", "another one", "no"]
    args = {"eval_interval": None, "eval_at_end": True, "eval_batch_size": 1, "wandb": True}
    more = {"eval_sampling_steps": 1, "eval_iters": 1, "train_iters": 1}
    run.with_args(valid_data=[], eval_prompts=prompts, **args, **more).train()
    received = sys.modules.pop("wandb").received
    wanted = [(b"ftyp", "a bar moves", "mp4"), (b"ftyp", "another one", "mp4")]
    assert received == [(1, wanted), 0]


def test_an_evaluation_before_the_first_step_is_made_once(run: Run) -> None:
    """Without learning, both evaluations are equal to the byte. A run that resumes adds none."""
    rate = ("deepspeed.optimizer.params.lr=0.0", "deepspeed.optimizer.params.weight_decay=0.0")
    args = {"eval_at_start": True, "eval_prompts": ["a bar"], "eval_sampling_steps": 1}
    run = run.with_args(**args).with_words(*rate)
    trainer = run.trainer()
    before = trainer.evaluator(7, trainer.parts.size.latents)
    trainer.train()
    first, *_, last = found = run.lines
    assert [line["step"] for line in found] == [0, 1, 2, 2]
    assert first == {"step": 0, **before} and last == {**first, "step": 2}
    (video,) = samples(run, 0).glob("*.mp4")
    assert video.read_bytes() == (samples(run) / video.name).read_bytes()
    assert (samples(run, 0) / "contact_sheet.png").is_file()
    assert [line["step"] for line in run.resume(steps=3).lines] == [0, 1, 2, 2, 3]


def test_bad_clips_of_the_held_out_data_have_a_list_of_their_own(run: Run, tmp_path: Path) -> None:
    """They must not end the training by counting towards its limit."""
    valid = write_clips(tmp_path / "valid")
    for i in range(3):
        (valid / "videos" / f"{i}.mp4").write_bytes(b"no video")
    args = {"valid_data": [str(valid)], "strict_eval": True, "eval_num_samples": 0}
    run = run.with_args(max_bad_fraction=0.5, **args).train(steps=4)
    assert len((run.path / "bad_samples_valid.jsonl").read_text().splitlines()) == 3
    assert not (run.path / "bad_samples.jsonl").exists()
    assert [line["step"] for line in run.lines if "valid_loss" in line] == [2, 4]


@pytest.mark.parametrize(
    ("owner", "method", "what"),
    [(Evaluator, "_encoded", "the held-out loss"), (VideoMaker, "frames", "sampling")],
)
def test_a_failure_is_logged_and_training_continues(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog, owner: type, method: str, what: str
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(owner, method, fail)
    run = run.train("args.eval_sampling_steps=2", steps=4)
    assert run.last.step == 4
    assert f"{what} at step 2 failed; training continues" in caplog.text
    assert "out of memory" in caplog.text
    has_loss = bool(run.logged("valid_loss"))
    assert has_loss == (what == "sampling")


def test_the_time_of_an_evaluation_is_not_the_steps(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation takes, by the clock, a month."""
    evaluate, month = Evaluator.__call__, 2.6e6  # seconds

    def slow(evaluator: Evaluator, *args: object) -> dict:
        evaluator.engine.clock.started -= month
        return evaluate(evaluator, *args)

    monkeypatch.setattr(Evaluator, "__call__", slow)
    found = run.train("args.eval_num_samples=0", steps=4).logged("step_ms")
    assert len(found) == 4 and max(found) < month


def test_an_evaluation_of_nothing_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    words = ("args.keep_best=-valid_loss", "args.resume=auto")  # a resumed run is not refused
    run.of("5b_i2v").with_args(valid_data=[], eval_prompts=["no image for it"]).trainer(*words)
    text = "args.keep_best=-valid_loss has nothing to evaluate; set args.valid_data or args.split=9,1,0, or args.eval_prompt_file with "
    assert text in caplog.text
