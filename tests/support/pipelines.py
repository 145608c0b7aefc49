"""Tiny pipelines of every family that diffusers wrote; the fixture `pipelines` of conftest.py has them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from cogfast.core.slot_random import SlotRandom
from tests.support.tiny_run import FAMILIES
from tests.support.tiny_transformers import randomize, write_t5

SIZE = (32, 48)  # rows and columns of clips: 4x6 latents
WIDTH = 32  # of the text embeddings
CAPTIONS = [
    "a red block moves right over grey",
    "a block of red goes to the right",
    "grey, and a red block that moves",
    "the red block moves over a grey wall",
]
PROMPT = "a red block moves right over grey"
STEPS, SCALE, SEED = 10, 3.0, 7


def transformer_of(family: str, in_channels: int | None = None) -> CogVideoXTransformer3DModel:
    is_15, is_i2v = family.startswith("1.5"), family.endswith("i2v")
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        in_channels=in_channels or (32 if is_i2v else 16),
        out_channels=16,
        ofs_embed_dim=512 if is_15 and is_i2v else None,
        text_embed_dim=WIDTH,
        num_layers=2,
        sample_height=SIZE[0] // 8,
        sample_width=SIZE[1] // 8,
        sample_frames=17 if is_15 else 9,
        patch_size_t=2 if is_15 else None,
        patch_bias=not is_15,
        max_text_seq_length=224 if is_15 else 226,
        use_rotary_positional_embeddings=family != "2b",
        use_learned_positional_embeddings=family == "5b_i2v",
    )
    randomize(model, seed=7)
    return model.eval()


@dataclass
class Pipelines:
    """Folders that diffusers wrote, and what it reads from them."""

    folder: Path

    def path(self, family: str) -> Path:
        return self.folder / family

    def load(self, family: str) -> CogVideoXPipeline:
        kind = CogVideoXImageToVideoPipeline if "i2v" in family else CogVideoXPipeline
        pipeline = kind.from_pretrained(self.path(family))
        pipeline.transformer.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def latents(
        self,
        pipeline: CogVideoXPipeline,
        num_frames: int,
        size: tuple[int, int] = SIZE,
        negative: str | None = None,
        **options: object,
    ) -> Tensor:
        """[C, T, h, w] from diffusers, of our noise. negative: None is an empty caption of zeros."""
        patch_t = pipeline.transformer.config.patch_size_t or 1
        frames = (num_frames - 1) // 4 + 1
        frames += -frames % patch_t
        shape = (1, 16, frames, size[0] // 8, size[1] // 8)
        noise = SlotRandom(0, 0, [SEED], 0).normal("sample", shape)
        length = pipeline.transformer.config.max_text_seq_length
        encode = lambda prompt: pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=length
        )[0]
        text = encode(PROMPT)
        found = pipeline(
            prompt_embeds=text,
            negative_prompt_embeds=torch.zeros_like(text) if negative is None else encode(negative),
            height=size[0],
            width=size[1],
            **({} if "control_video" in options else {"num_frames": num_frames}),
            num_inference_steps=STEPS,
            guidance_scale=SCALE,
            latents=noise.transpose(1, 2),
            output_type="latent",
            **options,
        ).frames
        return found[0].transpose(0, 1)


def write_pipelines(folder: Path) -> Pipelines:
    """Write a tiny pipeline of each family."""
    write_t5(folder / "t5", CAPTIONS, 34, vocab_size=160, d_model=WIDTH)
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX(block_out_channels=(32, 64, 64, 64), layers_per_block=1)
    vae.register_to_config(scaling_factor=0.7)
    for family in FAMILIES:
        scheduler = CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            snr_shift_scale=3.0 if family == "2b" else 1.0,
        )
        kind = CogVideoXImageToVideoPipeline if "i2v" in family else CogVideoXPipeline
        # Published folders have this key, too.
        vae.register_to_config(invert_scale_latents=family == "1.5_5b_i2v")
        kind(
            tokenizer=AutoTokenizer.from_pretrained(folder / "t5"),
            text_encoder=T5EncoderModel.from_pretrained(folder / "t5"),
            vae=vae,
            transformer=transformer_of(family),
            scheduler=scheduler,
        ).save_pretrained(folder / family)
    return Pipelines(folder)


def write_control_pipeline(
    pipelines: Pipelines, family: str, folder: Path, in_channels: int = 32
) -> Path:
    """Write the pipeline of a family with the network of CogVideoX-Fun's control models, with twice the
    channels and without a learned position table. in_channels: 33 for its inpainting models."""
    other = pipelines.load(family)
    parts = {
        name: getattr(other, name) for name in ("tokenizer", "text_encoder", "vae", "scheduler")
    }
    parts["transformer"] = transformer_of(family, in_channels=in_channels)
    CogVideoXFunControlPipeline(**parts).save_pretrained(folder)
    return folder
