"""Adapters that are added to a loaded model."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras
from tests.model.test_lora import save_as_sat
from tests.support.refusals import assert_refused
from tests.support.tiny_transformers import tiny

WEIGHT = "blocks.0.attention.out.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_change_of_the_weights(
    tmp_path: Path, dtype: torch.dtype, log: pytest.LogCaptureFixture
) -> None:
    trained = tiny("5b", lora_rank=4, lora_targets=("to_out.0",), num_layers=1)
    save_as_sat(trained, tmp_path / "lora")
    names = to_sat_state_dict(trained)
    a, b = (next(v for n, v in names.items() if f"matrix_{side}" in n).double() for side in "AB")
    model = tiny("5b", seed=1, num_layers=1).to(dtype)
    before = deepcopy(model.state_dict())
    add_loras(model, open_loras([LoraOverlay(str(tmp_path / "lora"), 0.01)], ema=False))
    change = 0.01 / 4 * (b @ a)
    left = model.state_dict()[WEIGHT].double() - before[WEIGHT].double()
    torch.testing.assert_close(left, change, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    assert log.text.count("scale 0.01") == 1


def test_several_files_are_rounded_once(tmp_path: Path) -> None:
    """Two files that cancel each other leave a bf16 model as it was, bit for bit."""
    for seed, name in enumerate(("one", "two")):
        save_as_sat(tiny("5b", seed=seed, lora_rank=4, num_layers=1), tmp_path / name)
    model = tiny("5b", seed=1, num_layers=1).bfloat16()
    before = deepcopy(model.state_dict())
    loras = [("one", 3.7), ("two", 0.3), ("one", -3.7), ("two", -0.3)]
    overlays = [LoraOverlay(str(tmp_path / name), scale) for name, scale in loras]
    add_loras(model, open_loras(overlays, ema=False))
    after = model.state_dict()
    for name, weight in before.items():
        # The sums in float32 are exact to far less than a step of bf16.
        torch.testing.assert_close(after[name], weight, atol=1e-6, rtol=0)
    add_loras(model, open_loras(overlays[:1], ema=False))
    assert not torch.equal(model.state_dict()[WEIGHT], before[WEIGHT])


@pytest.mark.parametrize("scale", ["nan", "inf", "much"])
def test_a_scale_that_is_no_number_is_refused(scale: str) -> None:
    line = f"--lora x:{scale}: <...> nor PATH:SCALE with a finite number"
    assert_refused(lambda: LoraOverlay.parse(f"x:{scale}"), line)


def test_a_scale_that_overflows_is_refused(tmp_path: Path) -> None:
    save_as_sat(tiny("5b", lora_rank=4, num_layers=1), tmp_path / "lora")
    model = tiny("5b", seed=1, num_layers=1)
    with pytest.raises(ValueError, match="with scale 1e[+]300: .* NaN or infinite"):
        add_loras(model, open_loras([LoraOverlay(str(tmp_path / "lora"), 1e300)], ema=False))
