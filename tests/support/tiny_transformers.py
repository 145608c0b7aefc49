"""A tiny member of each family and a tiny T5, whose weights are all random."""

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from cogfast.core.shapes import PatchSize
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer

_T2V_5B = TransformerConfig(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=2,
    in_channels=16,
    out_channels=16,
    patch_size=PatchSize(1, 2, 2),
    text_hidden_size=32,
    text_length=10,
    time_embed_dim=64,
    num_frames=13,
    latent_height=8,
    latent_width=12,
    position="rotary",
)
_T2V_15 = replace(_T2V_5B, patch_size=PatchSize(2, 2, 2), latent_height=20, latent_width=20)

FAMILY = {
    "2b": replace(
        _T2V_5B, position="sincos", height_interpolation=1.875, width_interpolation=1.875
    ),
    "5b": _T2V_5B,
    "5b_i2v": replace(_T2V_5B, in_channels=32, learnable_position=True),
    "1.5_5b": _T2V_15,
    "1.5_5b_i2v": replace(_T2V_15, in_channels=32, ofs_embed_dim=64),
}


def randomize(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Draw every parameter: matrices roughly preserve norms, norms and biases differ from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name == "position_table.weight" and not p.requires_grad:
                continue
            fan_in = p[0].numel() if p.dim() > 1 else 25
            p.normal_(std=fan_in**-0.5, generator=generator)
            if "norm" in name and name.endswith("weight") and p.dim() == 1:
                p.add_(1.0)
    return model


def tiny(name: str, seed: int = 0, **changes: object) -> DiffusionTransformer:
    transformer = assemble_transformer(replace(FAMILY[name], **changes))
    randomize(transformer, seed)
    return transformer


def inputs(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Arguments of forward: two samples of 4 latent frames, 8 rows, 12 columns."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    given = {
        "latents": draw(2, 16, 4, 8, 12),
        "timesteps": torch.tensor([17, 863]),
        "text": draw(2, 10, 32),
    }
    if "i2v" in name:
        given["condition_latents"] = draw(2, 16, 4, 8, 12)
    return given


def write_t5(folder: Path, sentences: Iterable[str], num_pieces: int, **sizes: int) -> Path:
    """Write a T5 folder as SAT's users have it: config, weights and spiece.model, nothing else."""
    import sentencepiece
    from transformers import T5Config, T5EncoderModel

    folder.mkdir(exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=num_pieces,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, **sizes}
    T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **sizes)).save_pretrained(folder)
    return folder
