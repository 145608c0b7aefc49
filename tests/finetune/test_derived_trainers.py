"""Subclasses in the shape of others' forks of CogVideo's trainer: own components, losses and validation."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from PIL import Image
from torch import Tensor

from cogfast.finetune import Args, Components, Trainer, get_model_cls
from tests.finetune.conftest import SIZE
from tests.support.derived_trainers import StageOne, SuperResolutionArgs
from tests.support.pipelines import PROMPT
from tests.support.refusals import assert_refused, refusals


def rotary_of(frames: int) -> tuple[Tensor, Tensor]:
    grid = (2, 3)
    return get_3d_rotary_pos_embed(64, None, grid, frames, grid_type="slice", max_size=grid)


def network_of(folder: Path) -> CogVideoXTransformer3DModel:
    model = CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")
    model.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    return model


def loss_of_diffusers(
    folder: Path,
    low: Tensor,
    high: Tensor,
    text: Tensor,
    step: int,
    noise_step: int = 0,
    model: CogVideoXTransformer3DModel | None = None,
) -> Tensor:
    """The objective of stage one for latents [B, C, T, h, w], with diffusers' network and scheduler."""
    scheduler = CogVideoXDPMScheduler.from_pretrained(folder / "scheduler")
    noised, times = low.transpose(1, 2), torch.full((len(low),), step)
    if noise_step:
        drawn = torch.randn_like(noised)
        noised = scheduler.add_noise(noised, drawn, torch.full((len(low),), noise_step))
    given = {"image_rotary_emb": rotary_of(3), "return_dict": False}
    velocity = (model or network_of(folder))(noised, text, times, **given)[0]
    found = scheduler.get_velocity(velocity, noised, times)
    return (found - high.transpose(1, 2)).square().mean()


def test_stage_one_has_the_loss_and_gradients_of_diffusers_network(run_options, pipelines):
    given = run_options("5b", training_type="sft", noise_step=700, batch_size=2)
    trainer = StageOne(SuperResolutionArgs(**given))
    run = trainer._prepare()
    model = network_of(pipelines.path("5b"))
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    low, high, text = draw(2, 16, 3, 4, 6), draw(2, 16, 3, 4, 6), draw(2, 226, 32)
    batch = {"low_latents": low, "high_latents": high, "prompt_embeddings": text}

    torch.manual_seed(5)
    loss = trainer.compute_loss(batch)
    torch.manual_seed(5)
    expected = loss_of_diffusers(pipelines.path("5b"), low, high, text, 399, 700, model)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)

    pairs = {
        "blocks.1.attention.out.weight": "transformer_blocks.1.attn1.to_out.0.weight",
        "blocks.0.fc1.weight": "transformer_blocks.0.ff.net.0.proj.weight",
        "time_embedding.fc1.weight": "time_embedding.linear_1.weight",
        "text_embedding.weight": "patch_embed.text_proj.weight",
    }
    own = [run.engine.transformer.get_parameter(name) for name in pairs]
    theirs = [model.get_parameter(name) for name in pairs.values()]
    grads = torch.autograd.grad(loss, own), torch.autograd.grad(expected, theirs)
    for name, one, other in zip(pairs, *grads, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() < 1e-5 * other.norm(), name


@pytest.mark.parametrize("family", ["5b", pytest.param("1.5_5b_i2v", marks=pytest.mark.soak)])
def test_a_pipeline_of_the_components_samples_as_diffusers(family, run_options, pipelines):
    """initialize_pipeline, and the network's call with text, image, rotary tables and ofs."""
    given = run_options(family, latent_cache="none")
    trainer = get_model_cls(given["model_name"], "lora")(Args(**given))
    with pytest.raises(AttributeError, match="transformer/config.json has no patch_size_of_text"):
        _ = trainer.state.transformer_config.patch_size_of_text
    trainer.state.transformer_config.pop("patch_size_t")  # as in published files of CogVideoX 1.0
    assert trainer.state.transformer_config.patch_size_t is None
    trainer._prepare()
    stock = pipelines.load(family)
    stock.scheduler = CogVideoXDPMScheduler.from_config(stock.scheduler.config)
    trainer.components.transformer.config["patch_size_t"] = stock.transformer.config.patch_size_t
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8))
    asked = {"height": SIZE[0], "width": SIZE[1], "num_frames": trainer.state.train_frames}
    asked |= {"max_sequence_length": stock.transformer.config.max_text_seq_length}
    asked |= {"num_inference_steps": 3, "output_type": "pt"}
    asked |= {"image": image} if family.endswith("i2v") else {}
    frames = []
    for pipe in (stock, trainer.initialize_pipeline()):
        generator = torch.Generator().manual_seed(1)
        frames.append(pipe(prompt=PROMPT, generator=generator, **asked).frames)
    assert frames[0].shape == frames[1].shape and frames[0].std() > 0.01
    assert (frames[0] - frames[1]).abs().max() < 1e-4


@pytest.mark.soak
def test_the_draws_of_compute_loss_are_those_of_its_step_and_samples(run_options):
    """Covers PyTorch, NumPy, Python, and the generator that upstream's methods pass on."""
    draws = []

    class Drawing(Trainer):
        def compute_loss(self, batch: dict) -> Tensor:
            own = torch.rand(1, generator=self.state.generator).item()
            video = torch.zeros(2, 3, 9, *SIZE)
            encoded = [self.encode_video(video).sum((1, 2, 3, 4)) for _ in "ab"]
            numbers = [torch.rand(1).item(), np.random.rand(), random.random(), own]
            draws.append((*numbers, *torch.cat(encoded).tolist()))
            assert batch["paths"] == ["0.mp4"] and batch["txt"] == ["a block"]
            return torch.zeros((), requires_grad=True)

    run = Drawing(Args(**run_options("5b")))._prepare()
    batch = {"encoded_videos": torch.zeros(1, 16, 3, 4, 6), "paths": ["0.mp4"], "txt": ["a block"]}
    batch["prompt_embedding"] = torch.zeros(1, 226, 32)
    for run.step, slot in ((0, 0), (1, 0), (0, 1), (0, 0)):
        run.compute_loss(batch | {"slots": [slot]})
    assert draws[0] == draws[3]
    assert all(len(set(column)) == 3 for column in zip(*draws[:3], strict=True))
    assert len(set(draws[0])) == len(draws[0]) == 8


def test_what_a_run_cannot_give_is_refused(run_options):
    trainer = StageOne(SuperResolutionArgs(**run_options("5b", overrides=["args.log_interval=1"])))
    trainer._prepare()
    parts = trainer.components
    latents, text, times = torch.zeros(1, 3, 16, 4, 6), torch.zeros(1, 226, 32), torch.tensor([5])
    call = lambda **given: parts.transformer(latents, text, times, **given)
    cos, sin = rotary_of(3)
    # The call of a pipeline at this size, and a table that is rounded.
    rounded = (cos.bfloat16(), sin.bfloat16())
    assert call(image_rotary_emb=rounded).sample.shape == latents.shape
    for wrong in (rotary_of(2), (sin, cos)):
        parts.transformer._checked.clear()
        line = "image_rotary_emb for 3x2x3 tokens differs <...>positions=pipe"
        assert_refused(lambda wrong=wrong: call(image_rotary_emb=wrong), line)
    assert_refused(lambda: call(), "this model has rotary positions; pass self.prepare_rotary")
    with pytest.raises(ValueError, match="does not take attention_kwargs; leave it out"):
        call(image_rotary_emb=(cos, sin), attention_kwargs={"scale": 0.5})
    line = "text_encoder: captions are encoded before training, <...> none"
    assert_refused(lambda: parts.text_encoder, line)


def other_weights(trainer: Trainer) -> Components:
    model = CogVideoXTransformer3DModel.from_pretrained(trainer.args.model_path / "transformer")
    with torch.no_grad():
        model.proj_out.weight.add_(1)
    return Components(transformer=model)


def other_class(trainer: Trainer) -> Components:
    return Components(vae=torch.nn.Linear(2, 2))


def network_too_early(trainer: Trainer, prompt: str) -> object:
    return trainer.components.transformer


def set_vae(trainer: Trainer) -> None:
    Trainer.load_components(trainer).vae = None


TWO_RANKS, VALIDATION = {"overrides": ["args.model_parallel_size=2"]}, {"validation_videos": "v"}
# Name: the method that a class overrides, by what, and changed options
METHODS = {
    "other weights": ("load_components", other_weights, {}),
    "another class": ("load_components", other_class, {}),
    "no components": ("load_components", lambda self: None, {}),
    "the network too early": ("encode_text", network_too_early, {"latent_cache": None}),
    "a pair as loss": ("compute_loss", lambda self, batch: (torch.zeros(()), {}), {}),
    "a VAE that is set": ("load_components", set_vae, {}),
    "components of ranks": ("compute_loss", lambda self, batch: self.components.vae, TWO_RANKS),
    "validation without a method": ("compute_loss", lambda self, batch: None, VALIDATION),
}


@refusals(Path(__file__).with_name("refusals.txt"), "methods that cannot work")
def test_methods_that_cannot_work_end_the_run_in_one_line(refusal, run_options):
    name, value, more = METHODS[refusal.words[0]]
    mine = type("Mine", (Trainer,), {name: value})
    given = run_options("5b", latent_cache="none") | more
    assert_refused(lambda: mine(Args(**given)).fit(), refusal.line)
