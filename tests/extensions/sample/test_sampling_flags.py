"""The plain options of `cogfast sample` set the keys that they stand for."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cogfast.cli.options import parse_sample
from cogfast.config import Config
from cogfast.config.yaml_files import to_dict
from cogfast.extensions.sample.flags import SamplingFlags, check_negative_prompt
from cogfast.extensions.sample.sizes import sampled_sizes
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import run_of

SAMPLER = "model.sampler_config.params"


def load(model: str = "cogvideox_5b", *overrides: str) -> Config:
    return run_of(f"{model}.yaml", "inference.yaml").config(*overrides)


def test_options_are_the_keys_that_they_name():
    """They give the configuration that the same keys, set by hand, give."""
    flags = SamplingFlags(steps=20, guidance=4.5, frames=17, num_videos=3)
    words = (f"{SAMPLER}.num_steps=20", f"{SAMPLER}.guider_config.params.scale=4.5")
    by_hand = load("cogvideox_5b", *words, "args.sampling_num_frames=5", "args.batch_size=3")
    found = load().filled(flags.settings)
    assert found.sections() == by_hand.sections()
    # The shipped file refers to the number of steps; the ramp follows in a run's file, too.
    guider = to_dict(found.model)["sampler_config"]["params"]["guider_config"]
    assert guider["params"] == {"scale": 4.5, "exp": 5, "num_steps": 20}
    text = found.describe()
    for line, flag in (
        ("num_steps: 20", "--steps"),
        ("scale: 4.5", "--guidance"),
        ("sampling_num_frames: 5", "--frames"),
        ("batch_size: 3", "--num-videos"),
    ):
        assert any(f" {line} " in row and row.endswith(f"# {flag}") for row in text.splitlines())


def test_nothing_given_changes_nothing():
    config = load()
    assert config.filled(SamplingFlags().settings) == config


def test_a_ramp_of_another_length_stays():
    config = load("cogvideox_5b", f"{SAMPLER}.guider_config.params.num_steps=30")
    params = to_dict(config.filled(SamplingFlags(steps=20).settings).model)["sampler_config"][
        "params"
    ]
    assert (params["num_steps"], params["guider_config"]["params"]["num_steps"]) == (20, 30)


def test_guidance_of_one_is_none_and_more_than_one_makes_it():
    config = load()
    off = config.filled(SamplingFlags(guidance=1.0).settings)
    target = lambda config: to_dict(config.model)["sampler_config"]["params"]["guider_config"]
    assert target(off) == {"target": "cogfast.diffusion.guidance.IdentityGuider"}
    assert target(off.filled(SamplingFlags(guidance=3.0).settings)) == {
        "target": "cogfast.diffusion.guidance.VanillaCFG",
        "params": {"scale": 3.0},
    }
    assert off.origins[f"{SAMPLER}.guider_config"] == "--guidance"
    assert f"{SAMPLER}.guider_config.params.scale" not in off.origins


AT_MOST_49 = "CogVideoX 1.0 supports 8N+1 frames, at most 49; use 41 or 49"


@pytest.mark.parametrize(
    ("model", "frames", "latent", "wrong", "text"),
    [
        ("cogvideox_2b", 49, 13, 48, AT_MOST_49),
        ("cogvideox1.5_5b", 73, 20, 75, "CogVideoX 1.5 supports 8N+1 frames"),
    ],
)
def test_frames_are_those_of_the_video(
    model: str, frames: int, latent: int, wrong: int, text: str
) -> None:
    config = load(model).filled(SamplingFlags(frames=frames).settings)
    assert config.args.sampling_num_frames == latent
    made = config.run
    (size,) = sampled_sizes(made.args, made.fields, made.data_arguments, [None])
    assert (size.num_frames, size.frames) == (frames, latent)
    with pytest.raises(ValueError, match=rf"^--frames={wrong}: {text}".replace("+", r"\+")):
        load(model).filled(SamplingFlags(frames=wrong).settings)


def test_a_negative_prompt_needs_guidance():
    config = load("cogvideox_5b", "args.negative_prompt=blurry")

    def check(config: Config) -> None:
        made = config.run
        check_negative_prompt(made.args.negative_prompt, made.sampler)

    check(config)
    check(load().filled(SamplingFlags(guidance=1.0).settings))
    line = "args.negative_prompt='blurry' <...> give --guidance 6"
    assert_refused(lambda: check(config.filled(SamplingFlags(guidance=1.0).settings)), line)


def test_options_that_a_configuration_cannot_take_are_refused():
    config = load("cogvideox_5b", "args.sampling_num_frames=3")
    line = "--frames and args.sampling_num_frames on the command line set"
    assert_refused(lambda: config.filled(SamplingFlags(frames=9).settings), line)
    node = {"target": "mine.Guider", "params": {"strength": 2}}
    OmegaConf.update(config.model, "sampler_config.params.guider_config", node, merge=False)
    line = "--guidance 3: mine.Guider has no param scale"
    assert_refused(lambda: config.filled(SamplingFlags(guidance=3.0).settings), line)


def parsed(tmp_path: Path, *words: str):
    (tmp_path / "training_config.yaml").touch()
    return parse_sample([str(tmp_path), "--prompt", "a", *words])


def test_options_are_read_from_the_command_line(tmp_path: Path) -> None:
    words = ["--steps", "20", "--guidance", "4.5", "--frames", "49", "--num-videos", "2"]
    given = ["--size", "480x720", "--fps", "8", "--negative-prompt", "a=b", "--seed", "5"]
    request = parsed(tmp_path, *words, *given)
    of_video = {"frames": 49, "num_videos": 2, "size": (480, 720), "fps": 8}
    assert request.sampling == SamplingFlags(steps=20, guidance=4.5, **of_video)
    keys = ('negative_prompt="a=b"', "seed=5")
    assert {f"args.{key}" for key in keys} <= set(request.overrides)


@refusals(Path(__file__).with_name("refusals.txt"), "options")
def test_wrong_values_are_named(refusal: Refusal, tmp_path: Path) -> None:
    assert_refused(lambda: parsed(tmp_path, *refusal.words), refusal.line)


def test_a_size_that_does_not_fit_is_named_as_it_was_typed() -> None:
    line = "^--size=33x48: rows must be a multiple of 16 and"
    assert_refused(lambda: load().filled(SamplingFlags(size=(33, 48)).settings), line)
    config = load().filled(SamplingFlags(size=(480, 720), fps=8).settings)
    assert (config.args.sampling_image_size, config.args.sampling_fps) == ([480, 720], 8)
    assert config.origins["args.sampling_image_size"] == "--size"
