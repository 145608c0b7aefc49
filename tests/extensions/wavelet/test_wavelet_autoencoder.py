"""The wavelet first stage: exact with every band, orthonormal, normalised, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cogfast.extensions.wavelet.wavelet_autoencoder import (
    NUM_BANDS,
    WaveletAutoencoder,
    WaveletState,
    band_matrix,
    haar_matrix,
)
from scripts.quickstart_wavelet import fit_wavelet, save_wavelet
from tests.support.refusals import assert_refused

# the exact transform: every band, unchanged
ALL_BANDS = WaveletState(torch.arange(NUM_BANDS), torch.zeros(NUM_BANDS), torch.ones(NUM_BANDS))


def clips(
    num_clips: int = 6, num_frames: int = 9, height: int = 16, width: int = 24
) -> torch.Tensor:
    """Smooth random videos [B, 3, F, H, W] in [-1, 1]: like pictures, mostly low bands."""
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randn(num_clips, 3, 3, 3, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (num_frames, height, width), mode="trilinear")
    return (smooth + 0.05 * torch.randn(smooth.shape, generator=generator)).tanh()


def test_haar_of_four_by_hand() -> None:
    half, root = 0.5, 2**-0.5
    expected = [[half] * 4, [half, half, -half, -half], [root, -root, 0, 0], [0, 0, root, -root]]
    assert torch.allclose(haar_matrix(4), torch.tensor(expected, dtype=torch.float64))


def test_bands_are_orthonormal_and_the_first_is_grey() -> None:
    matrix = band_matrix()
    identity = torch.eye(NUM_BANDS, dtype=torch.float64)
    assert (matrix @ matrix.T - identity).abs().max() < 1e-12
    # Mean over 3 colours, 4 frames and 64 pixels, with unit length.
    assert torch.allclose(matrix[0], torch.full((NUM_BANDS,), NUM_BANDS**-0.5).double())


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(1, 8, 8), (5, 16, 40), (13, 24, 8)],
    ids=["one picture", "wide", "tall"],
)
def test_all_bands_are_exact(num_frames: int, height: int, width: int) -> None:
    video = clips(2, num_frames, height, width)
    fitted = fit_wavelet([clips()], NUM_BANDS)
    for state in (ALL_BANDS, fitted):
        wavelet = WaveletAutoencoder(state=state)
        moments = wavelet.encode(video)
        shape = (2, NUM_BANDS, (num_frames - 1) // 4 + 1, height // 8, width // 8)
        assert moments.mean.shape == shape
        assert moments.logvar is None
        assert (wavelet.decode(moments.mean) - video).abs().max() < 1e-5


def test_it_stays_float32_in_a_bf16_run() -> None:
    state = fit_wavelet([clips()], NUM_BANDS)
    wavelet = WaveletAutoencoder(state=state).to("cpu", torch.bfloat16)
    latents = wavelet.encode(clips()).mean
    assert torch.equal(latents, WaveletAutoencoder(state=state).encode(clips()).mean)
    assert (wavelet.decode(latents) - clips()).abs().max() < 1e-5


def test_a_constant_colour_by_hand() -> None:
    red = torch.tensor([1.0, -1.0, -1.0]).view(1, 3, 1, 1, 1).expand(1, 3, 5, 8, 8)
    latents = WaveletAutoencoder(state=ALL_BANDS).encode(red).mean[0, :, :, 0, 0]
    # 256 values of each colour in a block: its mean times sqrt(256) along each luma-chroma axis.
    luma, red_minus_blue, green = -1 / 3**0.5, 2 / 2**0.5, -2 / 6**0.5
    expected = torch.zeros(NUM_BANDS, 2)
    expected[[0, 256, 512]] = 16 * torch.tensor([[luma], [red_minus_blue], [green]])
    assert torch.allclose(latents, expected, atol=1e-5)


def test_fit_keeps_the_strongest_bands_and_normalises() -> None:
    video = clips()
    state = fit_wavelet(video.split(2), 48)
    exact = WaveletAutoencoder(state=ALL_BANDS).encode(video).mean.double()
    energy = exact.square().sum(dim=(0, 2, 3, 4))
    assert set(state.bands.tolist()) == set(energy.argsort(descending=True)[:48].tolist())

    latents = WaveletAutoencoder(state=state).encode(video).mean.double()
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 1e-5
    assert latents.square().mean().sqrt() == pytest.approx(1, abs=1e-5)
    # Divided by std^0.5 and one constant, so a channel's variance is proportional to its old std.
    before = exact[:, state.bands].std(dim=(0, 2, 3, 4), correction=0)
    ratio = latents.var(dim=(0, 2, 3, 4), correction=0) / before
    assert (ratio / ratio.mean() - 1).abs().max() < 1e-4


def test_dropped_bands_cost_exactly_their_energy() -> None:
    video = clips(num_frames=1)  # one block: every band counts
    state = fit_wavelet([video], 60)
    wavelet = WaveletAutoencoder(state=state)
    error = wavelet.decode(wavelet.encode(video).mean) - video
    exact = WaveletAutoencoder(state=ALL_BANDS).encode(video).mean
    dropped = [band for band in range(NUM_BANDS) if band not in set(state.bands.tolist())]
    lost = exact[:, dropped].double().square().sum() / 4  # the frame fills a block four times
    assert error.double().square().sum() == pytest.approx(lost.item(), rel=1e-4)


def test_state_file_round_trip(tmp_path: Path) -> None:
    state = fit_wavelet([clips()], 48)
    path = tmp_path / "wavelet.safetensors"
    save_wavelet(state, path)
    video = clips(1)
    loaded = WaveletAutoencoder(ckpt_path=str(path))
    assert loaded.latent_channels == 48
    assert torch.equal(
        loaded.encode(video).mean, WaveletAutoencoder(state=state).encode(video).mean
    )
    assert not list(loaded.parameters())


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 3, 8, 8, 8), r"8 frames.*use 4N\+1"), ((1, 3, 9, 12, 8), "12x8.*multiples of 8")],
    ids=["frames", "rows"],
)
def test_clips_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    wavelet = WaveletAutoencoder(state=ALL_BANDS)
    with pytest.raises(ValueError, match=message):
        wavelet.encode(torch.zeros(shape))


def test_bad_state_files_are_refused(tmp_path: Path) -> None:
    line = "ckpt_path=<...>does not exist (a relative path starts<...>; set <...>, or write it with"
    assert_refused(lambda: WaveletAutoencoder(str(tmp_path / "none.safetensors")), line)
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(ValueError, match="text.safetensors: truncated or damaged"):
        WaveletAutoencoder(str(tmp_path / "text.safetensors"))
    save_file({"bands": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="has format None instead of 'cogfast-wavelet-1'"):
        WaveletAutoencoder(str(tmp_path / "other.safetensors"))
    state, metadata = fit_wavelet([clips()], 4), {"format": "cogfast-wavelet-1"}
    whole = {"bands": state.bands, "mean": state.mean, "scale": state.scale}
    for change in (
        {"mean": torch.tensor([0.0, math.nan, 0.0, 0.0])},
        {"scale": torch.zeros(4)},
        {"scale": state.scale[:3].clone()},
        {"bands": torch.tensor([0, 1, 2, NUM_BANDS])},
        {"bands": state.bands.int()},
    ):
        save_file(whole | change, tmp_path / "odd.safetensors", metadata)
        with pytest.raises(ValueError, match="odd.safetensors is damaged: bands, mean and"):
            WaveletAutoencoder(str(tmp_path / "odd.safetensors"))
    assert_refused(lambda: WaveletAutoencoder(), "either ckpt_path")
