"""The 3D VAE against upstream's numbers, chunk by chunk; names, files and what is refused."""

import copy
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKLCogVideoX
from safetensors.torch import load_file
from torch import Tensor

from cogfast.extensions.formats.vae import renamed
from cogfast.model import autoencoder as decode_memory
from cogfast.model.autoencoder import (
    ENCODE_MODES,
    Moments,
    VideoAutoencoder,
    bytes_per_pixel,
    encode_bytes,
    plan_decode,
    video_autoencoder_from_sat,
)
from tests.support.refusals import Refusal, assert_refused, refusals

TABLE = Path(__file__).with_name("refusals.txt")
TOLERANCE, SAMPLE_TOLERANCE = 2e-5, 5e-5  # upstream in float32 is within 6e-6 of float64
LEVELS, RES_BLOCKS = 4, 3
ENCODED = ("a9", "b1", "c13", "e25", "f8even")  # number of frames


@dataclass(frozen=True)
class TinyVae:
    """SAT's section, its checkpoint, and inputs with the outputs that belong to them."""

    params: dict  # of first_stage_config
    checkpoint: Path
    io: dict[str, Tensor]

    def build(self, **options: object) -> VideoAutoencoder:
        given = {k: self.params[k] for k in ("encoder_config", "decoder_config", "ignore_keys")}
        return video_autoencoder_from_sat(**given, ckpt_path=self.checkpoint, **options)


def in_tiles(vae: VideoAutoencoder, tile: tuple[int, int]) -> VideoAutoencoder:
    """Make `vae`, built with use_tiling, use tiles of this size in place of diffusers' 240x360."""
    vae.tile = vae.decode_tile = tile
    return vae


@pytest.fixture(scope="session")
def names(golden: Path) -> dict[str, dict]:
    """SAT's name -> {diffusers, tiny, full}: diffusers' name and both shapes, of all 436 tensors."""
    return json.loads((golden / "keys" / "vae_sat_to_diffusers.json").read_text())["map"]


@pytest.fixture(scope="session")
def tiny(golden: Path) -> TinyVae:
    folder = golden / "vae_tiny"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    params = config["model"]["first_stage_config"]["params"]
    return TinyVae(params, folder / "3d-vae.pt", load_file(folder / "io.safetensors"))


@pytest.fixture(scope="session")
def vae(tiny: TinyVae) -> VideoAutoencoder:
    """The default of the configs: clips are encoded whole, latents are decoded 3, 2, 2, ..."""
    return tiny.build()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def frames_per_call(module: torch.nn.Module, calls: list[int]):
    """Note how many frames each call of `module` gets."""
    return module.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[2]))


@pytest.mark.parametrize("case", ENCODED)
def test_encode_equals_sat(case: str, tiny: TinyVae, vae: VideoAutoencoder) -> None:
    moments = vae.encode(tiny.io[f"enc.{case}.video"])
    assert_close(moments.mean, tiny.io[f"enc.{case}.mean"])
    assert_close(2 * moments.std.log(), tiny.io[f"enc.{case}.logvar"])
    sample = moments.sample(tiny.io[f"enc.{case}.noise"])
    assert_close(sample, tiny.io[f"enc.{case}.sample"], SAMPLE_TOLERANCE)
    assert_close(0.7 * sample, tiny.io[f"enc.{case}.encode_first_stage"], SAMPLE_TOLERANCE)


def test_memory_layout_of_the_clip_does_not_matter(vae: VideoAutoencoder) -> None:
    """PyTorch's group norm of channels-last memory loses digits where a clip is nearly flat."""
    clip = torch.linspace(-0.8, -0.3, 9).view(1, 1, 9, 1, 1).repeat(1, 3, 1, 32, 48)
    for t in range(9):
        clip[:, :, t, :8, 3 * t : 3 * t + 8] = torch.tensor([1.0, -1, -1]).view(3, 1, 1)
    last = clip.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    moments = vae.encode(last)
    assert_close(moments.mean, vae.encode(clip).mean)
    precise = copy.deepcopy(vae.inner).double()
    precise.num_sample_frames_batch_size = 9
    assert_close(moments.mean, precise.encode(clip.double()).latent_dist.mean.float())


def test_encode_in_chunks_equals_diffusers(tiny: TinyVae, vae: VideoAutoencoder) -> None:
    chunked = tiny.build(encode_chunks="frames")
    calls: list[int] = []
    frames_per_call(chunked.inner.encoder, calls)
    video = tiny.io["enc.e25.video"]
    moments = chunked.encode(video)
    assert calls == [9, 8, 8]
    assert_close(moments.mean, tiny.io["diffusers.enc.e25.mean"])
    assert_close(2 * moments.std.log(), tiny.io["diffusers.enc.e25.logvar"])
    # The choice matters: group norm sees other frames.
    assert (moments.mean - vae.encode(video).mean).abs().max() > 0.01


@pytest.mark.parametrize(("T", "chunks"), [(4, [3]), (5, [3, 2]), (7, [3, 2, 2])])
def test_decode_serial_equals_sat_v1(
    T: int, chunks: list[int], tiny: TinyVae, vae: VideoAutoencoder
) -> None:
    # v1.0's loop loses the last of an even number of latents; the numbers of the others hold.
    z = tiny.io[f"dec.T{T}.z"][:, :, : sum(chunks)]
    calls: list[int] = []
    hook = frames_per_call(vae.inner.decoder, calls)
    video = vae.decode(z)
    hook.remove()
    assert calls == chunks
    assert_close(video, tiny.io[f"dec.T{T}.serial"])


def test_decode_without_the_surplus_latent_equals_sat_head(
    tiny: TinyVae, vae: VideoAutoencoder
) -> None:
    # 1.5 samples an even number of latents; the caller drops the one in front.
    video = vae.decode(tiny.io["dec.T6.z"][:, :, 1:])
    assert_close(video, tiny.io["head.dec.T6.first_stage_use_cp"])


def test_an_even_number_of_latents_decodes_to_4t_minus_3_frames(
    tiny: TinyVae, vae: VideoAutoencoder
) -> None:
    z = tiny.io["dec.T4.z"]
    odd = torch.cat([z[:, :, :1], z], dim=2)
    expected = vae.decode(odd)[:, :, 4:]  # four frames belong to the copy's place
    video = vae.decode(z)
    assert video.shape[2] == 4 * 4 - 3
    assert torch.equal(video, expected)


def test_slices_do_not_change_a_number(tiny: TinyVae, vae: VideoAutoencoder) -> None:
    sliced = tiny.build(use_slicing=True)
    video = tiny.io["enc.c13.video"][:, :, :5]
    video = torch.cat([video, video.flip(2)])
    latents = vae.encode(video).mean
    calls: list[int] = []
    sliced.inner.encoder.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    assert_close(sliced.encode(video).mean, latents)
    assert calls == [1, 1]
    assert_close(sliced.decode(latents), vae.decode(latents))


def blend(first: Tensor, second: Tensor, stride: int, extent: int, dim: int) -> Tensor:
    """Two tiles, the second `stride` further along `dim`, faded into each other over `extent`."""
    shape = [1] * first.ndim
    shape[dim] = extent
    fade = (torch.arange(extent) / extent).view(shape)
    seam = first.narrow(dim, stride, extent) * (1 - fade) + second.narrow(dim, 0, extent) * fade
    rest = second.narrow(dim, extent, second.shape[dim] - extent)
    return torch.cat([first.narrow(dim, 0, stride), seam, rest], dim)


@pytest.mark.parametrize(("axis", "tile", "stride"), [("rows", 48, 40), ("columns", 80, 64)])
def test_tiles_are_untiled_pieces_faded_into_each_other(
    axis: str, tile: int, stride: int, tiny: TinyVae, vae: VideoAutoencoder
) -> None:
    tiled = in_tiles(tiny.build(use_tiling=True), (48, 80))
    video, dim = tiny.io["enc.a9.video"][:, :, :5], 3 if axis == "rows" else 4
    # One axis longer than a tile, the other within the stride, so that it takes one tile.
    video = video[..., :64] if axis == "rows" else video[:, :, :, :40]
    first, second = (
        video.narrow(dim, start, min(tile, video.shape[dim] - start)) for start in (0, stride)
    )
    expected = blend(
        vae.encode(first).mean, vae.encode(second).mean, stride // 8, (tile - stride) // 8, dim
    )
    latents = tiled.encode(video).mean
    assert_close(latents, expected)

    latents = latents[:, :, :1]  # decoding is dear, and tiles have nothing to do with time
    first, second = (
        latents.narrow(dim, start // 8, min(tile, video.shape[dim] - start) // 8)
        for start in (0, stride)
    )
    expected = blend(vae.decode(first), vae.decode(second), stride, tile - stride, dim)
    assert_close(tiled.decode(latents), expected)


@pytest.mark.parametrize("name", ["cogvideox_2b.yaml", "cogvideox1.5_5b_i2v.yaml"])
def test_full_size_of_sats_configs(name: str, sat_configs: Path, names: dict) -> None:
    section = yaml.safe_load((sat_configs / name).read_text())["model"]["first_stage_config"]
    params = section["params"]
    with torch.device("meta"):
        vae = video_autoencoder_from_sat(params["encoder_config"], params["decoder_config"])
    state = renamed(vae.inner.state_dict(), LEVELS, RES_BLOCKS, "sat")
    assert {k: list(v.shape) for k, v in state.items()} == {k: v["full"] for k, v in names.items()}
    assert sum(p.numel() for p in vae.parameters()) == 215_583_907
    assert not any(p.requires_grad for p in vae.parameters())
    assert vae.latent_channels == 16


def test_prefixed_checkpoint_is_read(tiny: TinyVae, vae: VideoAutoencoder, tmp_path: Path) -> None:
    state = torch.load(tiny.checkpoint, weights_only=True)["state_dict"]
    prefixed = {f"first_stage_model.{k}": v for k, v in state.items()}
    prefixed["model.diffusion_model.time_embed.0.weight"] = torch.zeros(2)
    other = TinyVae(tiny.params, tmp_path / "engine.pt", tiny.io)
    torch.save({"state_dict": prefixed}, other.checkpoint)
    loaded = other.build(dtype=torch.bfloat16)
    for name, tensor in vae.inner.state_dict().items():
        assert torch.equal(loaded.inner.state_dict()[name], tensor.to(torch.bfloat16)), name
    image = tiny.io["enc.b1.video"][:, :, :1, :16, :16]  # bf16 is slow on some processors
    assert (loaded.encode(image).mean - vae.encode(image).mean).abs().max() < 0.2  # bf16


def test_loaded_tensors_share_no_memory(vae: VideoAutoencoder) -> None:
    storages = [p.untyped_storage() for p in vae.parameters()]
    assert len({s.data_ptr() for s in storages}) == 436
    assert sum(s.nbytes() for s in storages) == 4 * sum(p.numel() for p in vae.parameters())


def test_a_deviation_of_bf16_moments_is_not_rounded() -> None:
    logvar = torch.linspace(-30, 20, 501).bfloat16()
    std = Moments(torch.zeros(501, dtype=torch.bfloat16), logvar).std
    assert std.dtype == torch.float32
    torch.testing.assert_close(std.double(), (0.5 * logvar.double()).exp(), rtol=1e-6, atol=0)


Change = Callable[[dict[str, Tensor]], object]
FIRST = "encoder.conv_in.conv"
LOST = "decoder.up.3.block.0.norm1.conv_y.conv.bias"
CHANGES: dict[str, Change] = {
    "other names": lambda w: w.update({"encoder.mid.attn_1.q.weight": w.pop(LOST)}),
    "more channels": lambda w: w.update({f"{FIRST}.weight": torch.zeros(64, 3, 3, 3, 3)}),
    "NaN": lambda w: w[f"{FIRST}.bias"].fill_(math.nan),
    "integers": lambda w: w.update({f"{FIRST}.bias": w[f"{FIRST}.bias"].to(torch.int8)}),
    "nothing ignored": lambda w: None,
}


@refusals(TABLE, "a checkpoint of the VAE")
def test_checkpoints_that_do_not_fit_are_refused(
    refusal: Refusal, tiny: TinyVae, tmp_path: Path
) -> None:
    path, (what,) = tmp_path / "3d-vae.pt", refusal.words
    if what == "damaged":
        path.write_bytes(b"not a checkpoint")
    elif what != "missing":
        state = dict(torch.load(tiny.checkpoint, weights_only=True)["state_dict"])
        CHANGES[what](state)
        torch.save({"state_dict": state}, path)
    params = {**tiny.params, "ignore_keys": []} if what == "nothing ignored" else tiny.params
    assert_refused(TinyVae(params, path, tiny.io).build, refusal.line)


def test_sections_that_are_not_cogvideox_are_refused(tiny: TinyVae) -> None:
    encoder, decoder = (tiny.params[f"{side}_config"]["params"] for side in ("encoder", "decoder"))
    line = "ch_mult=[1, 2] and decoder_config.params.ch_mult=[1, 2, 2, 4]"
    other = encoder | {"ch_mult": [1, 2]}
    assert_refused(lambda: video_autoencoder_from_sat(other, decoder), line)


def test_diffusers_folder(tiny: TinyVae, vae: VideoAutoencoder, tmp_path: Path) -> None:
    vae.inner.save_pretrained(tmp_path / "model" / "vae")
    for path in (tmp_path / "model" / "vae", tmp_path / "model"):
        loaded = VideoAutoencoder(path)
        assert_close(loaded.encode(tiny.io["enc.c13.video"]).mean, tiny.io["enc.c13.mean"])
        assert not any(p.requires_grad for p in loaded.parameters())

    assert_refused(lambda: VideoAutoencoder(tmp_path / "nowhere"), "has no config.json")
    config = tmp_path / "model" / "vae" / "config.json"
    another = "_class_name='AutoencoderKL': only 'AutoencoderKLCogVideoX'"
    other = json.loads(config.read_text())
    for change, line in (
        ({"layers_per_block": 4}, "96 tensors (<...>) missing, 0 tensors unexpected"),
        ({"_class_name": "AutoencoderKL"}, another),
    ):
        config.write_text(json.dumps(other | change))
        assert_refused(lambda: VideoAutoencoder(tmp_path / "model"), line)


def test_frames_and_options_that_do_not_fit(vae: VideoAutoencoder) -> None:
    line = "60x64 do not divide into latent pixels"
    assert_refused(lambda: vae.encode(torch.zeros(1, 3, 1, 60, 64)), line)
    assert_refused(VideoAutoencoder, "give the vae folder of a diffusers CogVideoX model")


@pytest.fixture(scope="module")
def small() -> AutoencoderKLCogVideoX:
    """diffusers' VAE with random weights, whose own tiles are 48x40."""
    torch.manual_seed(0)
    return AutoencoderKLCogVideoX(
        block_out_channels=(32, 32, 32, 32), layers_per_block=1, sample_height=96, sample_width=80
    ).eval()


@torch.no_grad()
def test_every_way_to_encode_equals_diffusers_bit_for_bit(small: AutoencoderKLCogVideoX) -> None:
    dtype = torch.float32  # processors without bfloat16 take half a minute for each way
    clip = torch.rand(1, 3, 17, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found: dict[str, Tensor] = {}
    for chunks in ("auto", "frames", "tiles"):
        ours = VideoAutoencoder(inner=copy.deepcopy(small), encode_chunks=chunks).to(dtype)
        if chunks == "tiles":  # those of decoding do not change those of encoding
            ours.limit_decode_memory(0, 1, 96, 160)
            ours.decode(torch.zeros(1, 16, 1, 12, 20))
        found[chunks] = ours.encode(clip).mean
        theirs = copy.deepcopy(small).to(dtype)
        theirs.num_sample_frames_batch_size = 17 if chunks == "auto" else 8
        if chunks == "tiles":
            theirs.enable_tiling()
        expected = theirs.encode(clip.to(dtype)).latent_dist
        assert torch.equal(found[chunks], expected.mean)
    assert not torch.equal(found["auto"], found["frames"])
    assert not torch.equal(found["frames"], found["tiles"])
    image = clip[:, :, :1]  # a single frame is encoded whole
    expected = copy.deepcopy(small).bfloat16().encode(image.bfloat16()).latent_dist.mean
    assert torch.equal(ours.to(torch.bfloat16).encode(image).mean, expected)


@torch.no_grad()
def test_bytes_of_encoding_are_those_of_its_tensors(
    small: AutoencoderKLCogVideoX, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's profiler adds up what the allocator gave and took back. Convolutions only allocate
    their output here: inside they use up to 27 times their input on a CPU (im2col)."""

    def allocate(conv: torch.nn.Conv3d, x: Tensor) -> Tensor:
        sizes = zip(x.shape[2:], conv.padding, conv.kernel_size, conv.stride, strict=True)
        sides = [(side + 2 * pad - kernel) // stride + 1 for side, pad, kernel, stride in sizes]
        return x.new_zeros(len(x), conv.out_channels, *sides)

    monkeypatch.setattr(torch.nn.Conv3d, "forward", allocate)
    clip, found = torch.zeros(1, 3, 33, 64, 96), {}
    for mode in ENCODE_MODES:
        vae = VideoAutoencoder(inner=copy.deepcopy(small), encode_chunks=mode)
        with torch.profiler.profile(profile_memory=True) as profile:
            vae.encode(clip)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = max(itertools.accumulate(e.nbytes() for e in events))
        tile = (48, 40) if mode == "tiles" else None
        found[mode] = encode_bytes(small, mode, tile, (1, 33, 64, 96))
        pixels = clip.numel() * (1 + 4 + 2 * 4)
        # The tiles that are blended: the last kept bytes are counted for all of them.
        assert 0.8 < peak / (found[mode] - pixels) < 1.02, mode
    assert found["whole"] > 1.5 * found["frames"] > 2 * found["tiles"]


def test_encoding_stays_in_its_memory() -> None:
    """The published VAE, counted without memory: what fits decides, from whole clips to tiles."""
    with torch.device("meta"):
        vae = VideoAutoencoder(inner=AutoencoderKLCogVideoX().bfloat16())
    short, long = (2, 49, 480, 720), (1, 81, 768, 1360)
    plan = vae.limit_encode_memory(10**12, short)
    assert (plan.mode, plan.is_sliced, plan.passed_over) == ("whole", False, {})
    one = vae.limit_encode_memory(plan.num_bytes - 1, short)
    assert (one.mode, one.is_sliced) == ("whole", True)
    assert (vae.encode_mode, vae.has_encode_slices) == ("whole", True)
    fewer = vae.limit_encode_memory(one.num_bytes - 1, short)
    assert (fewer.mode, fewer.passed_over) == ("frames", {"whole": one.num_bytes})
    # One map of 128 channels has 21.7 GB here.
    tiles = vae.limit_encode_memory(24 * 10**9, long)
    assert (tiles.mode, list(tiles.passed_over)) == ("tiles", ["whole", "frames"])
    assert tiles.num_bytes < 8 * 10**9 and tiles.passed_over["whole"] > 7 * 21.7e9
    assert vae.limit_encode_memory(0, long) == tiles
    # A recorded mode and one that the config names are kept.
    kept = vae.limit_encode_memory(0, long, [("frames", True)])
    assert kept.num_bytes == tiles.passed_over["frames"]
    asked = VideoAutoencoder(inner=vae.inner, encode_chunks="frames")
    plan = asked.limit_encode_memory(10**12, long)
    assert (plan.mode, plan.is_sliced) == ("frames", False)


@torch.no_grad()
def test_decoding_stays_in_its_memory(small: AutoencoderKLCogVideoX) -> None:
    """Free memory decides between whole frames and tiles. Whole frames give the same outputs as before,
    tiles those of tiles that are asked for, and encoding never sees them."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(1, 16, 1, 16, 10, generator=generator)  # a frame of 128x80
    build = lambda **options: VideoAutoencoder(inner=copy.deepcopy(small), **options)
    vae = build()
    whole, image = vae.decode(z), torch.rand(1, 3, 1, 128, 80, generator=generator)
    moments = vae.encode(image)
    limited = build()
    plan = limited.limit_decode_memory(1 << 40, 1, 128, 80)
    assert plan.tile is None
    assert torch.equal(limited.decode(z), whole)

    tiled = limited.limit_decode_memory(int(0.9 * plan.num_bytes), 1, 128, 80)
    assert tiled.num_bytes <= 0.9 * plan.num_bytes
    found = limited.decode(z)
    assert torch.equal(found, in_tiles(build(use_tiling=True), tiled.tile).decode(z))
    assert torch.equal(limited.encode(image).mean, moments.mean)
    difference = (found - whole).norm() / whole.norm()
    assert 0 < difference < 1  # random weights: group norm of a tile is not the frame's

    asked = in_tiles(build(use_tiling=True), (96, 80))  # the config's stay
    assert asked.limit_decode_memory(1 << 40, 1, 128, 80).tile == (96, 80)

    # with enough memory again
    assert limited.limit_decode_memory(1 << 40, 1, 128, 80) == plan
    assert torch.equal(limited.decode(z), whole)


@torch.no_grad()
def test_bytes_of_decoding_are_those_of_its_tensors(tiny: TinyVae) -> None:
    """PyTorch's profiler adds up what the allocator gave and took back in one call of the decoder:
    the tensors and, on a CPU, up to as much again inside convolutions (their im2col)."""
    vae = tiny.build()
    z = torch.randn(1, 16, 3, 6, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        vae.decode(z)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    running = itertools.accumulate(e.nbytes() for e in events)
    per_pixel = bytes_per_pixel(vae.inner, 3) / decode_memory._INSIDE_CONVOLUTIONS
    assert 0.99 < max(running) / (per_pixel * 48 * 64) < 2.1
    whole = vae.limit_decode_memory(1 << 40, 9, 48, 64).num_bytes
    assert vae.bfloat16().limit_decode_memory(1 << 40, 9, 48, 64).num_bytes == whole // 2


@pytest.mark.parametrize("size", [(480, 720), (768, 1360), (1360, 768), (96, 80)])
def test_tiles_fit_their_budget_or_take_the_least(size: tuple[int, int]) -> None:
    per_pixel, video = 46000.0, 3 * 49 * size[0] * size[1] * 2
    whole = plan_decode(*size, per_pixel, video, 1 << 50)
    assert whole.tile is None
    seen = []
    for share in (1, 0.7, 0.5, 0.3, 0.1, 0.05, 0):
        plan = plan_decode(*size, per_pixel, video, int(share * whole.num_bytes))
        seen.append(plan.num_bytes)
        assert plan.num_bytes <= share * whole.num_bytes or plan.tile in (None, (96, 80))
        if plan.tile is not None:
            assert (plan.tile[0] % 48, plan.tile[1] % 40) == (0, 0)
    assert seen == sorted(seen, reverse=True)
