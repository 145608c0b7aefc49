"""Classes of a user's own are part of a run: changed code is found when it resumes, and by its caches."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cogfast.__main__ import main
from cogfast.data.video.clip import ClipSettings
from cogfast.extensions.cache.cached_data import cache_specs
from cogfast.extensions.formats.convert import convert
from cogfast.model.weights.checkpoint_manifest import RESUMABLE, read_manifest, write_manifest
from cogfast.train.trainer import Trainer
from tests.support.refusals import assert_command_refused, assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT
from tests.train.run.test_extending import example

FILES = {
    "mine_base": "FACTOR = 2.0\nclass Scaled:\n    def scaled(self, value): return FACTOR * value\n",
    "mine_trainer": """
from cogfast.train.trainer import Trainer
from mine_base import Scaled
class Mine(Scaled, Trainer):
    def __init__(self, config):
        super().__init__(config)
        self.learning_rate = lambda step: 0.25
    def losses(self, *given): return self.scaled(super().losses(*given))
""",
    "mine_parts": """
from cogfast.data.datasets import VideoFolder
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.diffusion.sampler import VideoDDIMSampler
from cogfast.diffusion.denoiser import DiscreteDenoiser, VideoScaling
import torch
class Loss(VideoDiffusionLoss): pass
class Lion(torch.optim.SGD): pass
class Clips(VideoFolder): pass
class Denoiser(DiscreteDenoiser): pass
class Scaling(VideoScaling): pass
class Sampler(VideoDDIMSampler): pass
""",
    "mine_encoders": """
from cogfast.data.datasets import VideoFolder
from cogfast.extensions.wavelet.wavelet_autoencoder import WaveletAutoencoder
from cogfast.model.text_encoder import ByteTextEncoder
class Stage(WaveletAutoencoder): pass
class Text(ByteTextEncoder): pass
class Clips(VideoFolder): pass
""",
}
PARTS = (
    "model.loss_fn_config.target=mine_parts.Loss",
    "model.sampler_config.target=mine_parts.Sampler",
)
Edit = Callable[[str, str], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Changes a module, which the next start of a run imports."""
    monkeypatch.syspath_prepend(tmp_path)

    def change(name: str, text: str) -> None:
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write(text)
        for known in FILES:
            sys.modules.pop(known, None)
        importlib.invalidate_caches()

    for name, text in FILES.items():
        change(name, text)
    return change


def mine(run: Run, name: str = "Mine") -> Run:
    return replace(run, kind=getattr(importlib.import_module("mine_trainer"), name))


ADVICE = "; change it back, or resume anyway with args.accept_changes=true"
OF_TRAINER = "trainer: the code of mine_trainer.Mine has changed"
# {module that changes, or none: the line that refuses the resume}
CHANGES = {
    None: "trainer: mine_trainer.Mine -> cogfast's own",
    "mine_trainer": OF_TRAINER,
    "mine_base": OF_TRAINER,
    "mine_parts": "model.loss_fn_config: the code of mine_parts.Loss has changed",
}


@pytest.fixture
def begun(run: Run, edit: Edit) -> Run:
    own = run.by(Trainer, "mine_parts").with_words(*PARTS, "args.num_workers=0")
    return mine(own).train(steps=1)


@pytest.mark.parametrize(("module", "line"), CHANGES.items())
def test_a_resumed_run_has_the_code_that_was_saved(
    begun: Run, edit: Edit, module: str | None, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(module or "mine_parts", "x = 1\n" if module else "")
    now = mine(begun) if module else replace(begun, kind=Trainer)
    assert_refused(lambda: now.resume(steps=2), f"checkpoint's: {line}{ADVICE}")
    assert now.resume("args.accept_changes=true", steps=2).last.step == 2
    assert "the configuration has changed: " in caplog.text and line in caplog.text
    # The next checkpoint has what was accepted.
    assert now.resume(steps=3).last.step == 3


def test_what_may_change_and_what_says_nothing(
    log: pytest.LogCaptureFixture, begun: Run, edit: Edit, tmp_path: Path
) -> None:
    """The code of a sampler may change; checkpoints of earlier versions, which name no class, resume."""
    saved = read_manifest(begun.checkpoint, RESUMABLE)
    for line in (
        "learning rate  0.25 in the first step, set by the trainer",
        "trainer        mine_trainer.Mine; held-out losses are the configured loss",
    ):
        assert line in (begun.path / "log.txt").read_text()
    assert saved["classes"].keys() == {"trainer", "model.loss_fn_config", "model.sampler_config"}
    assert main(["convert", str(begun.path), str(tmp_path / "converted"), "--to", "diffusers"]) == 0
    assert main(["report", str(begun.path)]) == 0
    del saved["classes"]["model.loss_fn_config"], saved["checksum"]
    write_manifest(begun.checkpoint, saved)
    edit("mine_parts", "x = 1\n")
    assert mine(begun).resume(steps=2).last.step == 2
    saved = read_manifest(begun.checkpoint, RESUMABLE)
    del saved["classes"], saved["checksum"]
    write_manifest(begun.checkpoint, saved)
    assert replace(begun, kind=Trainer).resume(steps=3).last.step == 3


def test_a_class_without_a_file_is_named_once(run: Run, log: pytest.LogCaptureFixture) -> None:
    begun = run.by(example("WeightByTimestep")).train(steps=1)
    saved = read_manifest(begun.checkpoint, RESUMABLE)["classes"]
    assert saved == {"trainer": {"name": "example.WeightByTimestep", "code": None}}
    assert log.text.count("the code of example.WeightByTimestep is in no file") == 1
    assert begun.by(example("WeightByTimestep")).resume(steps=2).last.step == 2


@pytest.mark.parametrize(
    ("key", "name", "kind"),
    [
        ("model.first_stage_config", "Stage", "video"),
        ("model.conditioner_config.params.emb_models.0", "Text", "text"),
        ("data", "Clips", "video"),
    ],
)
def test_a_cache_is_of_the_code_of_its_encoders(
    run: Run, edit: Edit, key: str, name: str, kind: str
) -> None:
    settings = ClipSettings(video_size=(32, 32), fps=8, max_num_frames=9)

    def specs(*words: str) -> dict[str, dict]:
        made = run.by(Trainer, "mine_encoders").config(*words).run
        described = made.sections, made.allow_import, made.args, made.model, made.frozen.overrides
        return cache_specs(*described, settings)

    own, plain = specs(f"{key}.target=mine_encoders.{name}"), specs()
    assert own[kind] != plain[kind]
    edit("mine_parts", "x = 1\n")
    assert specs(f"{key}.target=mine_encoders.{name}") == own
    edit("mine_encoders", "x = 1\n")
    found = specs(f"{key}.target=mine_encoders.{name}")
    assert {kind for kind in own if found[kind] != own[kind]} == {kind}
    # The key of caches that users have
    assert specs() == plain and plain["text"]["text encoder"] == "521554dbbf11"


@pytest.mark.parametrize("key", ["denoiser_config", "denoiser_config.params.scaling_config"])
def test_other_programs_would_sample_another_objective(
    run: Run, edit: Edit, key: str, log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    """Files for diffusers are written with a warning; a card with code that samples them is not."""
    name = "Scaling" if "scaling" in key else "Denoiser"
    own = run.by(Trainer, "mine_parts").with_words(f"model.{key}.target=mine_parts.{name}")
    found = f"trained with mine_parts.{name}, but diffusers samples by v"
    done = own.train("args.export=last", steps=1)
    assert f"args.export=last: {found}" in log.text
    convert(done.path, run.folder / "to", "diffusers")
    assert f"{done.path} was {found}" in log.text
    words = ["publish", done.path, "me/it", "--dry-run"]
    assert_command_refused(capsys, words, f"{done.checkpoint} was {found}")
    log.clear()
    plain = run.into(run.folder / "plain").train("args.export=last", steps=1)
    convert(plain.path, run.folder / "to another", "diffusers")
    assert "v-prediction" not in log.text


def test_sampling_a_run_needs_no_code_of_its_training(
    run: Run, edit: Edit, capsys: pytest.CaptureFixture
) -> None:
    """Optimizer, loss and data set are of training alone; the size of a video is that of the data."""
    words = ["deepspeed.optimizer={type: mine_parts.Lion, params: {lr: 0.01}}", PARTS[0]]
    words += ["data.target=mine_parts.Clips"]
    done = run.by(Trainer, "mine_parts").with_words(*words).train(steps=1)
    edit("mine_parts", "raise SystemExit('imported')\n")
    out = run.folder / "out"
    sample = ["sample", str(done.path), "--prompt", "a", "--steps", "1", "--out", str(out)]
    assert main(sample) == 0, capsys.readouterr().err
    found = json.loads((out / "settings.json").read_text())
    assert (found["num_frames"], found["prompts"][0]["height"]) == (9, 32)
    assert_command_refused(
        capsys, [*sample, PARTS[1]], "needs --allow-import with the name of your package"
    )


def test_a_missing_clip_of_a_cached_batch_is_explained(run: Run, tmp_path: Path) -> None:
    class Pixels(Trainer):
        def losses(self, batch, noised, conditioning):
            return batch["mp4"]

    cached = run.by(Pixels).cached_in(tmp_path / "cache")
    with pytest.raises(KeyError) as raised:
        cached.train("args.encode_first=true")
    assert raised.value.__notes__ == ["a latent cache holds no pixels; set args.latent_cache=null"]


def test_the_parts_of_the_page(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/extending.md: loss, timesteps, sampler, an optimizer with an average; then a data set."""
    text = (ROOT / "docs" / "extending.md").read_text()
    module = next(c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Lion" in c)
    (tmp_path / "myparts.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    parts = next(c for c in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "Lion" in c)
    (tmp_path / "parts.yaml").write_text(parts)
    own = run.with_args(eval_iters=1, eval_interval=2).by(Trainer, "myparts")
    own = own.of_files(own.base, tmp_path / "parts.yaml").with_words(
        "args.eval_sampling_steps=2", "args.eval_prompts=[a bar]"
    )
    done = own.train(steps=4)
    assert done.last.loss.weight(torch.tensor([0.99])).item() == 5
    assert list((done.path / "samples").rglob("*.mp4"))
    assert not torch.equal(*(done.weights(ema)["output.weight"] for ema in (False, True)))
    parted = own.into(tmp_path / "parts").train("args.exit_interval=2", steps=4)
    assert parted.resume(steps=4).losses == done.losses
    gray = run.with_args(
        dataset={"target": "myparts.Gray", "params": {"size": 32}}, train_data=["-"]
    )
    seen = []

    class Levels(Trainer):
        def losses(self, batch, noised, conditioning):
            for level, clip in zip(batch["level"], batch["mp4"], strict=True):
                assert clip.unique().item() == pytest.approx(20 * int(level) / 127.5 - 1, abs=1e-5)
                seen.append(int(level))
            return super().losses(batch, noised, conditioning)

    gray.into(tmp_path / "gray").by(Levels, "myparts").train(steps=2)
    assert sorted(seen) == list(range(8))
