"""Position tables and rotary angles, against numbers computed one by one."""

import math

import pytest
import torch

from cogfast.core.shapes import TokenGrid
from cogfast.model.embeddings import PositionTable, RotaryPositions, sincos_table
from tests.support.refusals import assert_refused
from tests.support.tiny_transformers import inputs, tiny

GRID = TokenGrid(3, 4, 5)


def test_sincos_table_by_hand() -> None:
    """A quarter of the row for time, 3/8 for the column, 3/8 for the row; sin, then cos."""
    width = 32
    table = sincos_table(GRID, width, (1.0, 2.0, 1.875)).view(3, 4, 5, width)
    t, h, w = 2, 3, 4
    for offset, size, position in ((0, 8, t), (8, 12, w / 1.875), (20, 12, h / 2.0)):
        half = size // 2
        for i in range(half):
            angle = position / 10000 ** (i / half)
            assert table[t, h, w, offset + i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            got = table[t, h, w, offset + half + i].item()
            assert got == pytest.approx(math.cos(angle), abs=1e-6)


def test_rotation_by_hand() -> None:
    """A head of 64: 16 entries turn with time, 24 with rows, 24 with columns; text stands still."""
    rotation = RotaryPositions(GRID, 64, theta=10000.0)(GRID).per_row(num_text=2)
    assert torch.equal(rotation[:2], torch.ones(2, 32, dtype=torch.complex64))
    row = rotation[2:].view(3, 4, 5, 32)[2, 3, 4]
    expected = [
        position / 10000 ** (2 * i / size)
        for size, position in ((16, 2), (24, 3), (24, 4))
        for i in range(size // 2)
    ]
    want = torch.tensor([complex(math.cos(a), math.sin(a)) for a in expected])
    torch.testing.assert_close(row, want.to(torch.complex64), atol=1e-6, rtol=0)


def test_a_smaller_video_takes_a_slice() -> None:
    rotary = RotaryPositions(GRID, 64, theta=10000.0)
    small = TokenGrid(2, 3, 2)
    whole = rotary(GRID).per_row(0).view(3, 4, 5, 32)
    assert torch.equal(rotary(small).per_row(0).view(2, 3, 2, 32), whole[:2, :3, :2])


def test_casting_the_model_leaves_angles_exact() -> None:
    rotary = RotaryPositions(GRID, 64, theta=10000.0)
    before = rotary(GRID).table
    assert torch.equal(rotary.to(torch.bfloat16)(GRID).table, before)
    with torch.device("meta"):
        empty = RotaryPositions(GRID, 64, theta=10000.0)
    assert torch.equal(empty.to_empty(device="cpu")(GRID).table, before)


@pytest.mark.parametrize("grid", [TokenGrid(4, 4, 5), TokenGrid(3, 5, 5), TokenGrid(3, 4, 6)])
def test_a_larger_video_is_refused(grid: TokenGrid) -> None:
    line = "the position table holds up to 3 frames of at most 4x5; set num_frames"
    assert_refused(lambda: RotaryPositions(GRID, 64, theta=10000.0)(grid), line)
    if grid.t > GRID.t:
        # Rows and columns are rescaled, frames are not.
        rescaled = RotaryPositions(GRID, 64, theta=10000.0, is_rescaled=True)
        assert_refused(lambda: rescaled(grid), "holds up to 3 frames")


def test_a_flattened_table_takes_only_its_own_rows_and_columns() -> None:
    table = PositionTable(GRID, text_length=2, width=32, interpolation=None)
    with torch.no_grad():
        table.weight.copy_(torch.arange(2 + 60.0)[:, None].expand(62, 32))
    added = table(torch.zeros(1, 2 + 40, 32), 2, TokenGrid(2, 4, 5))
    assert torch.equal(added[0, :, 0], torch.arange(42.0))  # fewer frames: the first rows
    given = torch.zeros(1, 2 + 48, 32), 2, TokenGrid(3, 4, 4)
    assert_refused(lambda: table(*given), "up to 3 frames of exactly 4x5")
    more_text = torch.zeros(1, 3 + 60, 32), 3, GRID
    assert_refused(lambda: table(*more_text), "3 text tokens: <...> text_length=2")


def test_inputs_that_do_not_fit_are_named() -> None:
    given = inputs("5b_i2v") | {"condition_latents": None}
    line = "have 16 channels together, <...> in_channels=32; the first stage"
    assert_refused(lambda: tiny("5b_i2v")(**given), line)
    three = inputs("1.5_5b") | {"latents": torch.zeros(2, 16, 3, 8, 12)}
    line = "3x8x12 <...> do not divide into patches of 2x2x2"
    assert_refused(lambda: tiny("1.5_5b")(**three), line)


BASE = TokenGrid(13, 30, 45)


@pytest.mark.parametrize("size", [(16, 24), (45, 30), (48, 85), (1, 7), (31, 46)], ids=str)
def test_pipeline_positions_are_diffusers(size: tuple[int, int]) -> None:
    """Every digit of what CogVideoXPipeline gives its transformer, at any size."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    grid = TokenGrid(5, *size)
    crops = get_resize_crop_region_for_grid(size, BASE.w, BASE.h)
    cos, sin = get_3d_rotary_pos_embed(64, crops, size, grid.t)
    turns = RotaryPositions(BASE, 64, theta=10000.0, is_rescaled=True)(grid).per_row(num_text=0)
    assert torch.equal(turns.real.repeat_interleave(2, -1), cos)
    assert torch.equal(turns.imag.repeat_interleave(2, -1), sin)


@pytest.mark.parametrize("name", ["5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v"])
def test_pipeline_positions_differ_at_another_size_of_1_0_alone(name: str) -> None:
    """The two kinds agree at the model's own size, and for 1.5, whose pipeline does not rescale."""
    small = {**inputs(name)}
    cut = lambda x: x[..., :6, :8] if x.ndim == 5 else x
    models = [tiny(name, rotary_positions=kind) for kind in ("integer", "pipeline")]
    with torch.no_grad():
        whole = [model(**small) for model in models]
        torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-5)
        if name == "5b_i2v":  # its table has one size
            return
        part = [model(**{k: cut(v) for k, v in small.items()}) for model in models]
    if name == "5b":
        assert (part[0] - part[1]).abs().max() > 1e-2
    else:
        assert torch.equal(*part)
