"""A pipeline folder with random weights, clips with captions, and the options of `cogfast finetune`.

For the benches of `cogfast finetune` against CogVideo's diffusers trainer.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.steps.step_models import MODELS, Variant
from bench.steps.step_sides import Theirs
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.finetune import Args

NUM_FRAMES = 9  # CogVideo's trainer takes 8N+1
_VOCABULARY = 60  # at most, of pieces
_SCHEDULER = {
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "snr_shift_scale": 1.0,
}


def write_pipeline(folder: Path, model: str, channels: int = 32) -> Variant:
    """Write a pipeline with the transformer of bench.steps.step_models; return its sizes.

    channels: of the VAE at every resolution.
    """
    import sentencepiece
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDPMScheduler, CogVideoXPipeline
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    config = replace(MODELS[model][0], num_frames=NUM_FRAMES)
    variant = Variant(config, 1, torch.float32, torch.device("cpu"))
    t5_folder = folder.with_name(folder.name + "-t5")
    t5_folder.mkdir(parents=True)
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_caption(i) for i in range(20)),
        model_writer=pieces,
        vocab_size=_VOCABULARY,
        hard_vocab_limit=False,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
    )
    (t5_folder / "spiece.model").write_bytes(pieces.getvalue())
    torch.manual_seed(0)
    t5 = T5Config(
        vocab_size=160,
        feed_forward_proj="gated-gelu",
        d_model=config.text_hidden_size,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
    )
    T5EncoderModel(t5).save_pretrained(t5_folder)
    vae = AutoencoderKLCogVideoX(block_out_channels=(channels,) * 4, layers_per_block=1)
    vae.register_to_config(scaling_factor=0.7)
    CogVideoXPipeline(
        tokenizer=AutoTokenizer.from_pretrained(t5_folder),
        text_encoder=T5EncoderModel.from_pretrained(t5_folder),
        vae=vae,
        transformer=Theirs(variant).network,
        scheduler=CogVideoXDPMScheduler(**_SCHEDULER),
    ).save_pretrained(folder)
    return variant


def write_data(folder: Path, num_clips: int, size: tuple[int, int]) -> None:
    """Write clips of a drifting texture in rows x columns, prompts.txt and videos.txt."""
    from cogfast.data.video.writer import write_video

    rows, columns = size
    for i in range(num_clips):
        rng = np.random.default_rng(i)
        coarse = rng.integers(0, 256, (rows // 16 + 1, columns // 16 + 1, 3), dtype=np.uint8)
        picture = np.kron(coarse, np.ones((16, 16, 1), np.uint8))[:rows, :columns]
        # Twice the frames that are read, as every second one is.
        frames = [np.roll(picture, 2 * t, axis=1) for t in range(2 * NUM_FRAMES)]
        write_video(folder / "videos" / f"{i}.mp4", np.stack(frames), fps=16)
    lines = lambda text: "".join(text(i) + "\n" for i in range(num_clips))
    (folder / "prompts.txt").write_text(lines(_caption))
    (folder / "videos.txt").write_text(lines("videos/{}.mp4".format))


def _caption(number: int) -> str:
    return f"a video of squares in the sea, which drift to the right, number {number}"


def size_of(variant: Variant) -> tuple[int, int]:
    """Return the rows and columns of the clips that a model is trained on."""
    config = variant.config
    return (
        config.latent_height * SPATIAL_COMPRESSION,
        config.latent_width * SPATIAL_COMPRESSION,
    )


def options(pipeline: Path, data: Path, out: Path, size: tuple[int, int], **changes) -> Args:
    """Return the arguments of both sides: those of CogVideo's scripts, with other paths and sizes."""
    given = {
        "model_path": pipeline,
        "model_name": "cogvideox-t2v",
        "model_type": "t2v",
        "training_type": "lora",
        "output_dir": out,
        "report_to": "tensorboard",
        "data_root": data,
        "caption_column": "prompts.txt",
        "video_column": "videos.txt",
        "train_resolution": f"{NUM_FRAMES}x{size[0]}x{size[1]}",
        "train_epochs": 10,
        "seed": 42,
        "batch_size": 1,
        "mixed_precision": "no",
    }
    return Args(**given | changes)


def samples_of(args: Args) -> list[tuple[Path, str]]:
    """Return the videos and captions of the data set."""
    lines = lambda name: (args.data_root / name).read_text().splitlines()
    videos = [args.data_root / line for line in lines(args.video_column)]
    return list(zip(videos, lines(args.caption_column), strict=True))


def latent_file(args: Args, video: Path) -> Path:
    """Return the file of a video's latents in the cache of CogVideo's trainer."""
    size = "x".join(map(str, args.train_resolution))
    folder = args.data_root / "cache" / "video_latent" / args.model_name / size
    return folder / f"{video.stem}.safetensors"


def text_file(args: Args, caption: str) -> Path:
    """Return the file of a caption's embedding in the cache of CogVideo's trainer."""
    name = hashlib.sha256(caption.encode()).hexdigest()
    return args.data_root / "cache" / "prompt_embeddings" / f"{name}.safetensors"
