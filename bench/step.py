"""A train step of ours against one of diffusers' model: python -m bench.step [--out FILE].

Both run a plain loop in this process: forward, mean squared error, backward, torch's AdamW. Steps
alternate, and the ratio is the median over pairs, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cogfast.model.transformer import TransformerConfig, assemble_transformer
from cogfast.shapes import PatchSize

# hidden 256, 6 layers, 1,000 tokens: 40 of text and 4 x 12 x 20 of video
TINY = TransformerConfig(
    num_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    in_channels=16,
    out_channels=16,
    patch_size=PatchSize(1, 2, 2),
    text_hidden_size=64,
    text_length=40,
    time_embed_dim=256,
    num_frames=13,
    latent_height=24,
    latent_width=40,
    position="rotary",
)
# configs/quickstart.yaml's: 48 video and 32 text tokens, batch 16
QUICKSTART = TransformerConfig(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    in_channels=48,
    out_channels=48,
    patch_size=PatchSize(1, 2, 2),
    text_hidden_size=64,
    text_length=32,
    time_embed_dim=192,
    num_frames=9,
    latent_height=8,
    latent_width=8,
    position="rotary",
)
MODELS = {"tiny": (TINY, 1), "quickstart": (QUICKSTART, 16)}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw_batch(config: TransformerConfig, batch_size: int, dtype: torch.dtype) -> Batch:
    """latents [B, C, T, h, w], timesteps [B], text [B, L, E] and a target like the latents."""
    frames = (config.num_frames - 1) // config.time_compressed_rate + 1
    shape = (batch_size, config.in_channels, frames, config.latent_height, config.latent_width)
    text = torch.randn(batch_size, config.text_length, config.text_hidden_size, dtype=dtype)
    latents = torch.randn(shape, dtype=dtype)
    return latents, torch.randint(1000, (batch_size,)), text, torch.randn_like(latents)


def make_step(
    model: torch.nn.Module, forward: Callable[[Batch], torch.Tensor], batch: Batch
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        loss = (forward(batch) - batch[3]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_ours(config: TransformerConfig, batch: Batch, dtype: torch.dtype) -> Callable[[], None]:
    model = assemble_transformer(config).to(dtype).train()
    return make_step(model, lambda b: model(b[0], b[1], b[2]), batch)


def make_theirs(config: TransformerConfig, batch: Batch, dtype: torch.dtype) -> Callable[[], None]:
    """diffusers' CogVideoXTransformer3DModel of the same sizes; its rotary table is made once."""
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid = (config.latent_height // 2, config.latent_width // 2)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.head_width,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        time_embed_dim=config.time_embed_dim,
        text_embed_dim=config.text_hidden_size,
        num_layers=config.num_layers,
        sample_width=config.latent_width,
        sample_height=config.latent_height,
        sample_frames=config.num_frames,
        max_text_seq_length=config.text_length,
        use_rotary_positional_embeddings=True,
    )
    model = model.to(dtype).train()
    frames = batch[0].shape[2]
    rotary = get_3d_rotary_pos_embed(config.head_width, ((0, 0), grid), grid, frames)
    latents = batch[0].transpose(1, 2).contiguous()  # [B, T, C, h, w]

    def forward(batch: Batch) -> torch.Tensor:
        output = model(latents, batch[2], batch[1], image_rotary_emb=rotary, return_dict=False)
        return output[0].transpose(1, 2)

    return make_step(model, forward, batch)


def measure(steps: dict[str, Callable[[], None]], num_pairs: int) -> dict[str, list[float]]:
    """Milliseconds of every step, the models taking turns at going first."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(num_pairs + 2):
        for name in sorted(steps, reverse=i % 2 == 0):
            start = time.perf_counter()
            steps[name]()
            if i >= 2:  # the first two warm up
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config, batch_size = MODELS[arguments.model]
    dtype = getattr(torch, arguments.dtype)
    batch = draw_batch(config, batch_size, dtype)
    steps = {"ours": make_ours(config, batch, dtype)}
    if not arguments.ours_only:
        steps["diffusers"] = make_theirs(config, batch, dtype)
    times = measure(steps, arguments.pairs)

    result = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "pairs": arguments.pairs,
        "torch": torch.__version__,
        **{f"{name}_ms": round(statistics.median(t), 2) for name, t in times.items()},
    }
    if "diffusers" in times:
        pairs = zip(times["ours"], times["diffusers"], strict=True)
        result["ratio"] = round(statistics.median(a / b for a, b in pairs), 4)
    print(json.dumps(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
