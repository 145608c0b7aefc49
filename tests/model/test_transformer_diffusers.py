"""All five members of the family against diffusers' CogVideoXTransformer3DModel, same weights."""

from pathlib import Path

import pytest
import torch

from cogfast.model.weights.load import load_transformer
from tests.support.tiny_transformers import FAMILY, inputs, randomize, tiny


def diffusers_model(name: str, num_heads: int = 2) -> torch.nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    config = FAMILY[name]
    is_15 = config.patch_size.t == 2
    model = CogVideoXTransformer3DModel(
        num_attention_heads=num_heads,
        attention_head_dim=config.hidden_size // num_heads,
        in_channels=config.in_channels,
        out_channels=16,
        time_embed_dim=64,
        ofs_embed_dim=config.ofs_embed_dim,
        text_embed_dim=32,
        num_layers=config.num_layers,
        sample_width=config.latent_width,
        sample_height=config.latent_height,
        sample_frames=config.num_frames,
        patch_size=2,
        patch_size_t=2 if is_15 else None,
        max_text_seq_length=10,
        use_rotary_positional_embeddings=config.position == "rotary",
        use_learned_positional_embeddings=config.learnable_position,
        patch_bias=not is_15,
    )
    randomize(model, seed=3)
    return model.eval()


def run_diffusers(name: str, model: torch.nn.Module, given: dict) -> torch.Tensor:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    latents = given["latents"]
    if "condition_latents" in given:
        latents = torch.cat([latents, given["condition_latents"]], dim=1)
    rotary = None
    if name.startswith("5b"):
        rotary = get_3d_rotary_pos_embed(64, ((0, 0), (4, 6)), (4, 6), 4)
    elif name.startswith("1.5"):
        rotary = get_3d_rotary_pos_embed(64, None, (4, 6), 2, grid_type="slice", max_size=(10, 10))
    output = model(
        latents.transpose(1, 2),
        given["text"],
        given["timesteps"],
        ofs=torch.tensor([2.0]) if name == "1.5_5b_i2v" else None,
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    return output.transpose(1, 2)


@pytest.mark.parametrize("name", FAMILY)
def test_output_and_gradients_agree(name: str, tmp_path: Path) -> None:
    theirs = diffusers_model(name)
    theirs.save_pretrained(tmp_path)
    ours = tiny(name, seed=4)
    report = load_transformer(ours, tmp_path)
    assert not report.unexpected, report
    given = inputs(name)
    with torch.no_grad():
        output, expected = ours(**given), run_diffusers(name, theirs, given)
    # their norm_out has eps 1e-5, SAT's and ours 1e-6: half of 9e-6 of outputs up to 5
    assert 5e-6 < (output - expected).abs().max() < 3e-5

    theirs.norm_out.norm.eps = 1e-6
    expected = run_diffusers(name, theirs, given)
    output = ours(**given)
    assert (output - expected).abs().max() < 4e-6

    expected.square().mean().backward()
    output.square().mean().backward()
    pairs = {
        "transformer_blocks.0.ff.net.2.weight": ours.blocks[0].fc2.weight,
        "transformer_blocks.1.attn1.norm_q.weight": ours.blocks[1].attention.query_norm.weight,
        "patch_embed.text_proj.weight": ours.text_embedding.weight,
        "time_embedding.linear_1.bias": ours.time_embedding.fc1.bias,
    }
    for key, parameter in pairs.items():
        want = dict(theirs.named_parameters())[key].grad
        error = (parameter.grad - want).abs().max() / want.abs().max()
        assert error < 1e-5, f"{key}: {error}"
    to_v = theirs.transformer_blocks[0].attn1.to_v.weight.grad
    error = (ours.blocks[0].attention.qkv.weight.grad[256:] - to_v).abs().max() / to_v.abs().max()
    assert error < 1e-5
