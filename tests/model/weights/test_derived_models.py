"""Models derived from CogVideoX: their folders are refused, with what they may be."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from safetensors.torch import load_file, save_file

from cogfast.model.config import Family, TransformerConfig
from cogfast.model.transformer import assemble_transformer
from cogfast.model.weights.diffusers import write_diffusers
from cogfast.model.weights.identify import identify
from cogfast.model.weights.load import check_family, load_transformer
from cogfast.model.weights.open import open_source
from tests.extensions.formats.test_peft import source_of
from tests.support.pipelines import Pipelines
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_transformers import FAMILY, tiny


def write(folder: Path, family: str, pipeline: str | None = None, **changes: object) -> Path:
    """Write the transformer folder of a tiny model, in a pipeline of class `pipeline`."""
    transformer = tiny(family, **changes)
    write_diffusers(source_of(transformer, None), transformer.config, folder / "transformer")
    if pipeline is not None:
        (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return folder


def change_config(folder: Path, **values: object) -> None:
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_class_name", "ConsisIDTransformer3DModel"),
        ("flip_sin_to_cos", False),
        ("freq_shift", 1),
        ("norm_elementwise_affine", False),
        ("in_channels", 32),
    ],
)
def test_a_network_that_differs_is_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    """Its tensors have the names and shapes of CogVideoX's; only config.json tells."""
    folder = write(tmp_path, "5b")
    assert load_transformer(tiny("5b"), folder).missing == ["unused_position_embeddings"]
    change_config(folder, **{key: value})
    ours = {"norm_elementwise_affine": "elementwise_affine"}.get(key, key)
    with pytest.raises(ValueError, match=f"(?i){ours}=.?{value}"):
        identify(open_source(folder))
    # diffusers' own default is CogVideoX's value.
    change_config(folder, _class_name="CogVideoXTransformer3DModel", in_channels=16)
    file = folder / "transformer" / "config.json"
    given = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in given.items() if k != key}))
    identify(open_source(folder))


def test_the_class_of_the_pipeline_is_read(tmp_path: Path) -> None:
    """CogVideoX-Interpolation has 5B-I2V's tensors."""
    folder = write(tmp_path / "other", "5b_i2v", "ConsisIDPipeline")
    for path in (folder, folder / "transformer"):
        with pytest.raises(ValueError, match="model_index.json: _class_name='ConsisIDPipeline'"):
            open_source(path)
    # A damaged file may have any value there, also one that a dictionary cannot look up.
    for i, no_text in enumerate(({"a": 1}, ["CogVideoXPipeline"], None)):
        folder = write(tmp_path / f"damaged {i}", "5b_i2v")
        (folder / "model_index.json").write_text(json.dumps({"_class_name": no_text}))
        assert_refused(lambda folder=folder: open_source(folder), "model_index.json: _class_name=")
    for family, kind in (
        ("5b", "CogVideoXVideoToVideoPipeline"),
        ("5b_i2v", "CogVideoXImageToVideoPipeline"),
        ("1.5_5b_i2v", "CogVideoXImageToVideoPipeline"),
        ("5b_i2v", "CogVideoXFunControlPipeline"),
    ):
        open_source(write(tmp_path / family / kind, family, kind))


@refusals(Path(__file__).with_name("refusals.txt"), "another kind of model")
def test_refusals_say_what_a_file_may_be(refusal: Refusal) -> None:
    """Not that it is an image-to-video model, which needs a checkpoint of the same model."""
    family, channels = refusal.words
    found = Family.of_config(replace(FAMILY[family], in_channels=int(channels)))
    for config in (FAMILY[family], FAMILY["5b_i2v"]):
        if channels == "32" or config == FAMILY[family]:
            check = lambda config=config: check_family("args.load=x", found, config)
            assert_refused(check, refusal.line)


def test_unknown_tensors_have_a_warning_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, "5b")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"local_face_extractor.weight": torch.zeros(2)}, file)
    report = load_transformer(tiny("5b", lora_rank=2), folder)
    with caplog.at_level(logging.INFO, logger="cogfast"):
        report.log()
    plain, warning = caplog.records
    assert "tensors loaded" in plain.message and "matrix_A" not in plain.message
    assert warning.levelno == logging.WARNING
    assert "1 tensor with unknown names" in warning.message
    assert "local_face_extractor.weight" in warning.message


def test_a_whole_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "5b") / "transformer"
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    shard = "diffusion_pytorch_model-00001-of-00001.safetensors"
    save_file(tensors, folder / shard)
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (folder / f"{file.name}.index.json").write_text(json.dumps(index))
    line = f"has {file.name}, which holds a whole <...> keep the files of one"
    assert_refused(lambda: open_source(tmp_path), line)
    file.unlink()
    open_source(tmp_path)


def at_size(base: TransformerConfig, rows: int, columns: int) -> TransformerConfig:
    return replace(base, latent_height=rows, latent_width=columns)


def test_a_learned_table_is_resized_to_the_networks_grid(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    folder = pipelines.path("5b_i2v")
    source = open_source(folder)
    base = identify(source)
    table = source.read("position_table.weight", None).float()  # diffusers writes float64
    num_text = base.text_length
    same = assemble_transformer(base)
    load_transformer(same, folder, positions="resize")
    assert torch.equal(same.position_table.weight, table)  # exact at its own size
    wide = assemble_transformer(at_size(base, 4, 12))
    assert_refused(lambda: load_transformer(wide, folder), "position_table.weight has shape")
    load_transformer(wide, folder, positions="resize")
    found = wide.position_table.weight[0]
    assert torch.equal(found[:num_text], table[0, :num_text])
    # Twice the columns, by hand: between two old columns lie new ones at a quarter and three quarters.
    old = table[0, num_text:].view(3, 2, 3, -1)
    new = found[num_text:].view(3, 2, 6, -1)
    torch.testing.assert_close(new[:, :, 1], 0.75 * old[:, :, 0] + 0.25 * old[:, :, 1])
    torch.testing.assert_close(new[:, :, 2], 0.25 * old[:, :, 0] + 0.75 * old[:, :, 1])
    torch.testing.assert_close(new[:, :, 0], old[:, :, 0])  # beyond the outer centres: constant
    # An export has the new size, in which diffusers' class takes it.
    write_diffusers(source_of(wide, None), wide.config, tmp_path / "wide")
    theirs = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "wide")
    assert (theirs.config.sample_height, theirs.config.sample_width) == (4, 12)
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(1))
    latents, image = draw(1, 16, 3, 4, 12), draw(1, 16, 3, 4, 12).flip(2)
    text, t = draw(1, num_text, base.text_hidden_size), torch.tensor([500])
    theirs.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    rotary = get_3d_rotary_pos_embed(64, ((0, 0), (2, 6)), (2, 6), 3)
    joined = torch.cat([latents, image], dim=1).transpose(1, 2)
    expected = theirs(joined, text, t, image_rotary_emb=rotary, return_dict=False)[0]
    output = wide(latents, t, text, image)
    assert (output - expected.transpose(1, 2)).norm() < 1e-5 * expected.norm()


def test_a_learned_table_can_be_dropped(pipelines: Pipelines) -> None:
    folder = pipelines.path("5b_i2v")
    base = identify(open_source(folder))
    bare = assemble_transformer(replace(base, learnable_position=False))
    assert_refused(lambda: load_transformer(bare, folder), "a learned table")
    report = load_transformer(bare, folder, positions="drop")
    assert report.missing == ["unused_position_embeddings"] and not report.unexpected
    zeroed = assemble_transformer(base)
    load_transformer(zeroed, folder)
    zeroed.position_table.weight.data.zero_()
    draw = torch.Generator().manual_seed(0)
    latents, image = torch.randn(2, 1, 16, 3, 4, 6, generator=draw)
    text = torch.randn(1, base.text_length, base.text_hidden_size, generator=draw)
    given = (latents, torch.tensor([9]), text, image)
    assert torch.equal(bare(*given), zeroed(*given))
