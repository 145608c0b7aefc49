"""Ranks that split the rows of a sample compute the output and the gradients of one process.

test_layouts trains with them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cogfast.distributed.context_parallel import rows_of_ranks
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.train.activation_checkpointing import Policy
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import FAMILY, randomize


@dataclass(frozen=True)
class Case:
    family: str = "5b"
    batch: int = 1
    grid: tuple[int, int, int] = (3, 2, 4)  # frames, rows and columns of tokens
    policy: Policy = "none"
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False
    share: float | None = None  # of blocks that attention leaves out

    def num_tokens(self) -> int:
        t, h, w = self.grid
        return FAMILY[self.family].text_length + t * h * w


CASES = {
    "even": Case(),
    "batch of 2": Case(batch=2),
    "odd": Case(grid=(3, 3, 5)),
    "odd, batch of 2": Case(batch=2, grid=(3, 3, 5), policy="full"),
    "2b": Case("2b", batch=2, grid=(3, 4, 6)),
    "1.5 i2v": Case("1.5_5b_i2v", grid=(2, 3, 3), policy="attention_kept"),
    "few video rows": Case(grid=(1, 1, 2)),  # the first rank has text rows only
    "bf16": Case(dtype=torch.bfloat16, batch=2, grid=(3, 3, 5), policy="pointwise"),
    "sparse": Case("5b_i2v", batch=2, grid=(4, 12, 12), share=0.5),
    "compiled": Case(is_compiled=True, batch=2),
}
QUICK = [name for name in CASES if name != "compiled"]


def model_of(name: str) -> DiffusionTransformer:
    case = CASES[name]
    t, h, w = case.grid
    config = replace(FAMILY[case.family], num_layers=2)
    if case.share is not None:  # a grid with several blocks
        config = replace(config, num_frames=4 * t - 3, latent_height=2 * h, latent_width=2 * w)
    transformer = assemble_transformer(config)
    randomize(transformer, seed=0)
    transformer.use_sparse_attention(case.share)
    return transformer.to(case.dtype).train()


def loss_of(transformer: DiffusionTransformer, name: str) -> dict[str, Tensor]:
    """Return the output and the gradients by parameter, in float32."""
    case, config = CASES[name], transformer.config
    patch, (t, h, w) = config.patch_size, case.grid
    draw = torch.Generator().manual_seed(1)
    size = (t * patch.t, h * patch.h, w * patch.w)
    image = config.in_channels - config.out_channels
    latents = torch.randn(case.batch, config.in_channels - image, *size, generator=draw)
    condition_latents = torch.randn(case.batch, image, *size, generator=draw) if image else None
    width = config.text_hidden_size
    text = torch.randn(case.batch, config.text_length, width, generator=draw)
    timesteps = torch.tensor([3.0, 700.0])[: case.batch]
    output = transformer(latents, timesteps, text, condition_latents).float()
    (output * torch.randn(output.shape, generator=draw)).sum().backward()
    named = transformer.named_parameters()
    gradients = {n: p.grad.float() for n, p in named if p.grad is not None}
    return {"output": output.detach(), **gradients}


def check(folder: Path, name: str) -> None:
    expected, found = loss_of(model_of(name), name), torch.load(folder / f"{name}.pt")
    assert found.keys() == expected.keys()
    tolerance = 2e-5 if CASES[name].dtype == torch.float32 else 3e-2
    for key, value in expected.items():
        if CASES[name].family == "2b" and key.endswith("key_norm.bias"):
            continue  # without rotation its gradient is zero but for rounding
        assert value.norm() > 0, key
        assert (found[key] - value).norm() <= tolerance * value.norm(), key


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launch_ranks(2, "tests/support/ranks/context_parallel_ranks.py", str(folder), *QUICK)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_equal_one(of_two: Path, name: str) -> None:
    check(of_two, name)


@pytest.mark.soak
def test_compiled_blocks(tmp_path: Path) -> None:
    launch_ranks(2, "tests/support/ranks/context_parallel_ranks.py", str(tmp_path), "compiled")
    check(tmp_path, "compiled")


def test_cases_have_odd_rows_and_ranks_without_video() -> None:
    assert CASES["odd"].num_tokens() % 2 == 1
    few = CASES["few video rows"]
    assert rows_of_ranks(few.num_tokens(), 2)[0] <= FAMILY[few.family].text_length


@pytest.mark.parametrize(("rows", "size"), [(10, 1), (10, 3), (17776, 8), (5, 4), (3, 3)])
def test_rows_are_shared_out(rows: int, size: int) -> None:
    found = rows_of_ranks(rows, size)
    assert len(found) == size and sum(found) == rows
    assert max(found) - min(found) <= 1
