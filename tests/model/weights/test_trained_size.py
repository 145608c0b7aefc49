"""The size that a model was trained at, and its rotary positions: in checkpoints and exports, against
diffusers' pipeline; what is logged where a pipeline would do otherwise."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from cogfast.config.sat_network import transformer_arguments
from cogfast.extensions.formats.convert import convert
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source
from cogfast.train.video_size import check_size, warn_of_pipeline_positions
from tests.model.weights.test_weights_load import seal, write_run
from tests.support.refusals import assert_refused
from tests.support.runs import Run, run_of
from tests.support.tiny_transformers import inputs, tiny

NETWORK = "model.network_config.params"
POSITION = f"{NETWORK}.modules.pos_embed_config.params"
LONGER = f"{NETWORK}.num_frames=17"
LARGER = (f"{NETWORK}.latent_height=8", f"{NETWORK}.latent_width=8")
TRAINED = [9, 4, 8]  # frames, latent rows and columns; the network's own are 13, 8 and 12


def write_trained(folder: Path, positions: str, sizes: list[list[int]]) -> torch.nn.Module:
    """A run of the tiny 5B with weights in which positions matter."""
    trained = tiny("5b", rotary_positions=positions)
    checkpoint = write_run(folder, trained)
    config = run_of("cogvideox_5b.yaml").config()
    network = OmegaConf.to_container(config.model.network_config, resolve=True)
    network["params"] |= {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
    network["params"] |= {"time_embed_dim": 64, "num_frames": 13}
    network["params"] |= {"latent_height": 8, "latent_width": 12}
    modules = network["params"]["modules"]
    modules["patch_embed_config"]["params"]["text_hidden_size"] = 32
    modules["pos_embed_config"]["params"] |= {"text_length": 10, "positions": positions}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    more = {"video_sizes": sizes, "config": {"model": {"network_config": network}}}
    seal(checkpoint, manifest | more)
    return trained


def of_pipeline(folder: Path, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The exported transformer, called as CogVideoXPipeline does at the size of the latents."""
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel.from_pretrained(folder).eval()
    model.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    _, _, frames, rows, columns = given["latents"].shape
    stand_in = SimpleNamespace(transformer=model, vae_scale_factor_spatial=8)
    rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        stand_in, rows * 8, columns * 8, frames, torch.device("cpu")
    )
    return model(
        given["latents"].transpose(1, 2),
        given["text"],
        given["timesteps"],
        image_rotary_emb=rotary,
        return_dict=False,
    )[0].transpose(1, 2)


@pytest.mark.parametrize(
    ("positions", "sample_size", "is_logged"),
    [("integer", (9, 4, 8), True), ("pipeline", (9, 8, 12), False)],
)
def test_a_stock_pipeline_has_the_positions_of_training(
    positions: str, sample_size: tuple[int, int, int], is_logged: bool, tmp_path: Path, caplog
) -> None:
    trained = write_trained(tmp_path / "run", positions, [TRAINED])
    with caplog.at_level("INFO", logger="cogfast"):
        convert(tmp_path / "run", tmp_path / "theirs", "diffusers", verify=True)
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    found = tuple(about[f"sample_{side}"] for side in ("frames", "height", "width"))
    assert found == sample_size
    assert ("trained at 32x64 with integer positions" in caplog.text) == is_logged
    given = inputs("5b")
    given["latents"] = given["latents"][:, :, :3, :4, :8].contiguous()
    with torch.no_grad():
        expected, output = trained(**given), of_pipeline(tmp_path / "theirs", given)
    assert (output - expected).abs().max() <= 2e-6 * expected.abs().max()

    config = identify(open_source(tmp_path / "run"))
    assert (config.trained_size, config.rotary_positions) == (tuple(TRAINED), positions)
    caplog.clear()
    convert(tmp_path / "run", tmp_path / "sat", "sat", verify=True)
    assert ("SAT's code uses integer ones" in caplog.text) == (positions == "pipeline")


@pytest.mark.parametrize("sizes", [[], [TRAINED, [9, 8, 8]]], ids=["unknown", "several"])
def test_without_one_trained_size_the_networks_own_is_written(
    sizes: list[list[int]], tmp_path: Path
) -> None:
    write_trained(tmp_path / "run", "integer", sizes)
    convert(tmp_path / "run", tmp_path / "theirs", "diffusers", verify=True)
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (about["sample_frames"], about["sample_height"], about["sample_width"]) == (13, 8, 12)


def test_a_run_notes_its_size(run: Run) -> None:
    run = run.train(*LARGER, f"{POSITION}.positions=pipeline", steps=1)
    assert run.last.engine.transformer.rotary.is_rescaled
    source = open_source(run.path)
    assert source.facts["trained_size"] == (9, 4, 4)
    assert source.facts["rotary_positions"] == "pipeline"


@pytest.mark.parametrize(
    ("family", "arguments", "text"),
    [
        ("5b", LARGER, "videos of 32x32 are trained with integer positions"),
        ("5b_i2v", (LONGER,), "9 frames use a part of the learned position table"),
        ("5b", (*LARGER, f"{POSITION}.positions=pipeline"), None),
    ],
)
def test_training_says_what_a_pipeline_will_do(
    family: str, arguments: tuple[str, ...], text: str | None, run: Run, caplog
) -> None:
    with caplog.at_level("INFO", logger="cogfast"):
        made = run.of(family).config(*arguments).run
        warn_of_pipeline_positions(made.data_arguments, made.network.config)
    assert [text in line for line in caplog.messages] == [True] * (text is not None)


def test_pipeline_positions_have_no_largest_size(run: Run) -> None:
    for positions in ("integer", "pipeline"):
        config = run.config(f"{POSITION}.positions={positions}")
        network = transformer_arguments(config.model.network_config.params)
        check = partial(check_size, network, 64, 128, "args.sampling_image_size")
        if positions == "pipeline":
            check()
        else:
            assert_refused(check, "table ends at")
    line = "positions='rescaled' must be one of integer, pipeline"
    assert_refused(lambda: run.config(f"{POSITION}.positions=rescaled"), line)
