"""Upstream's stock YAML files train, evaluate, resume and sample, with VAE and T5 in the loop.

Only arguments of the command line are added: they shrink the network and name local files. What the
trainer computes at step 1 is computed a second time from the mp4 on by PyAV, sentencepiece,
transformers, diffusers' VAE and transformer, and the formulas of the paper in float64.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import T5EncoderModel

from cogfast.__main__ import main
from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.extensions.formats.vae import renamed
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.train.encode import Encoder
from tests.support.pipelines import CAPTIONS, SIZE, WIDTH, transformer_of
from tests.support.ranks.forked import run_forked
from tests.support.runs import run_of
from tests.support.tiny_run import losses, read_run_weights, run_folder
from tests.support.tiny_transformers import write_t5
from tests.support.video_files import constant_rate, decode_all, write_clip

SEED = 3  # drops the caption of the first sample of step 1 and keeps the second


@dataclass(frozen=True)
class Case:
    """One stock model file. num_latents: T of a clip, without padding."""

    name: str
    is_fp32: bool = False  # sft.yaml asks for bf16

    @property
    def tolerance(self) -> float:
        """Relative tolerance of the loss."""
        return 2e-6 if self.is_fp32 else 5e-3

    @property
    def family(self) -> str:
        return self.name.removeprefix("cogvideox").removeprefix("_").removesuffix("_lora")

    @property
    def is_15(self) -> bool:
        return "1.5" in self.name

    @property
    def is_i2v(self) -> bool:
        return "i2v" in self.name

    @property
    def num_frames(self) -> int:
        return 17 if self.is_15 else 9


QUICK = "cogvideox_5b_i2v_lora"  # the others are a soak
CASES = {
    case.name: case
    for case in (
        Case("cogvideox_2b_lora"),
        Case(QUICK, is_fp32=True),
        Case("cogvideox1.5_5b_i2v"),
    )
}


@dataclass(frozen=True)
class Files:
    """The files that a user has beside the YAML files."""

    folder: Path
    vae: AutoencoderKLCogVideoX

    @property
    def t5(self) -> Path:
        return self.folder / "t5"

    def arguments(self, case: Case) -> list[str]:
        """Paths, and sizes that two CPU cores can train."""
        network, coder = "model.network_config.params", "model.first_stage_config.params"
        modules = f"{network}.modules"
        arguments = [
            f"args.load={self.folder / case.name}",
            f"{coder}.ckpt_path={self.folder / '3d-vae.pt'}",
            f"{coder}.encoder_config.params.ch=32",
            f"{coder}.decoder_config.params.ch=32",
            f"model.conditioner_config.params.emb_models[0].params.model_dir={self.t5}",
            f"{modules}.patch_embed_config.params.text_hidden_size={WIDTH}",
            f"{network}.num_layers=2",
            f"{network}.num_attention_heads=2",
            f"{network}.hidden_size=128",
            "model.sampler_config.params.num_steps=3",
            "model.sampler_config.params.guider_config.params.num_steps=3",
        ]
        if not case.is_15:  # 1.5 slices its table of 300x300, 1.0's is the clip's size
            rows, columns = (side // 8 for side in SIZE)
            arguments += [f"{network}.latent_height={rows}", f"{network}.latent_width={columns}"]
            arguments.append(f"{network}.num_frames={case.num_frames}")
        if "lora" in case.name:
            arguments.append(f"{modules}.lora_config.params.r=4")
        return arguments

    def training(self, case: Case, sat_configs: Path, save: Path) -> list[str]:
        clips = self.folder / f"clips-{case.num_frames}"
        files = (sat_configs / f"{case.name}.yaml", sat_configs / "sft.yaml")
        words = ["--base", *map(str, files), "--seed", str(SEED), *self.arguments(case)]
        words += [f"args.train_data=[{clips}]", f"args.valid_data=[{clips}]", f"args.save={save}"]
        words += ["args.train_iters=3", "args.eval_interval=2", "args.save_interval=2"]
        words += ["args.num_workers=0", "args.log_interval=1"]
        words += [f"data.params.video_size=[{SIZE[0]},{SIZE[1]}]"]
        words += [f"data.params.max_num_frames={case.num_frames}"]
        for kind in ("reduce", "allgather"):
            words.append(f"deepspeed.zero_optimization.{kind}_bucket_size=1000000")
        return words + ["deepspeed.bf16.enabled=false"] * case.is_fp32

    def sampling(self, case: Case, sat_configs: Path, load: Path, prompts: Path) -> list[str]:
        num_latents = {9: 3, 17: 6}[case.num_frames]  # SAT counts 1.5's padding
        files = (sat_configs / f"{case.name}.yaml", sat_configs / "inference.yaml")
        words = ["--base", *map(str, files), *self.arguments(case), f"args.load={load}"]
        words += [f"args.input_file={prompts}", f"args.output_dir={prompts.parent / 'outputs'}"]
        words += [f"args.sampling_image_size=[{SIZE[0]},{SIZE[1]}]"]
        return [*words, f"args.sampling_num_frames={num_latents}"]


def write_vae(path: Path) -> AutoencoderKLCogVideoX:
    torch.manual_seed(0)
    channels = (32, 64, 64, 128)  # ch=32, ch_mult [1, 2, 2, 4]
    vae = AutoencoderKLCogVideoX(block_out_channels=channels, layers_per_block=3).eval()
    state = renamed(vae.state_dict(), 4, 3, "sat")
    torch.save({"state_dict": {**state, "loss.logvar": torch.zeros(())}}, path)
    return vae


def write_clips(folder: Path, num_frames: int) -> None:
    """Clips of just the size, length and rate that are asked for."""
    for i, caption in enumerate(CAPTIONS):
        video = folder / "videos" / f"{i}.mp4"
        write_clip(video, constant_rate(num_frames, 8), size=SIZE)
        (folder / "labels").mkdir(exist_ok=True)
        (folder / "labels" / f"{i}.txt").write_text(caption + "\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, sat_configs: Path) -> Files:
    """The frozen parts, clips, and for every case a SAT checkpoint with diffusers' weights."""
    folder = tmp_path_factory.mktemp("user")
    write_t5(folder / "t5", CAPTIONS, 34, vocab_size=160, d_model=WIDTH)
    for num_frames in (9, 17):
        write_clips(folder / f"clips-{num_frames}", num_frames)
    found = Files(folder, write_vae(folder / "3d-vae.pt"))
    for case in CASES.values():
        transformer_of(case.family).save_pretrained(folder / "diffusers" / case.name)
        config = run_of(sat_configs / f"{case.name}.yaml").config(*found.arguments(case))
        config.model.network_config.params.modules.pop("lora_config", None)  # the base model's
        transformer = build_transformer(config.model)
        load_transformer(transformer, folder / "diffusers" / case.name)
        state = {key: value.clone() for key, value in to_sat_state_dict(transformer).items()}
        iteration = folder / case.name / "1"
        iteration.mkdir(parents=True)
        torch.save({"module": state}, iteration / "mp_rank_00_model_states.pt")
        (folder / case.name / "latest").write_text("1")
    return found


@dataclass
class FirstStep:
    """The inputs and results of the trainer's first step, as recorded there."""

    batch: dict | None = None
    latents: Tensor | None = None
    text: Tensor | None = None
    image_latents: Tensor | None = None
    losses: Tensor | None = None


@pytest.fixture
def first_step(monkeypatch: pytest.MonkeyPatch) -> FirstStep:
    seen = FirstStep()
    encode, loss = Encoder.__call__, VideoDiffusionLoss.of

    def encode_and_note(self, batch, rng, has_dropout=True):
        latents, conditioning = encode(self, batch, rng, has_dropout)
        if seen.batch is None:
            seen.batch, seen.latents, seen.text = batch, latents, conditioning.text
            seen.image_latents = conditioning.condition_latents
        return latents, conditioning

    def loss_and_note(self, *inputs):
        found = loss(self, *inputs)
        seen.losses = found.detach() if seen.losses is None else seen.losses
        return found

    monkeypatch.setattr(Encoder, "__call__", encode_and_note)
    monkeypatch.setattr(VideoDiffusionLoss, "of", loss_and_note)
    return seen


class Again:
    """Step 1 of a case computed from the mp4 files on, without cogfast but for its draws."""

    def __init__(self, case: Case, files: Files, paths: list[str]) -> None:
        self.case, self.files, self.paths = case, files, paths
        self.dtype = torch.float32 if case.is_fp32 else torch.bfloat16
        self.rng = SlotRandom(SEED, 0, range(len(paths)), len(paths))
        self.scale = 1.15258426 if "2b" in case.name else 0.7

    def clips(self) -> Tensor:
        """[B, 3, F, H, W] in [-1, 1]."""
        frames = [decode_all(path)[: self.case.num_frames] for path in self.paths]
        pixels = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3).contiguous()
        return (pixels.float() - 127.5) / 127.5

    @torch.no_grad()
    def encode(self, video: Tensor, purpose: str) -> Tensor:
        vae = copy.deepcopy(self.files.vae).to(self.dtype)
        vae.num_sample_frames_batch_size = video.shape[2]
        posterior = vae.encode(video.to(self.dtype)).latent_dist
        std = (0.5 * posterior.logvar.float()).exp()
        noise = self.rng.normal(purpose, std.shape)
        return self.scale * (posterior.mean.float() + std * noise)

    def latents(self) -> Tensor:
        latents = self.encode(self.clips(), "first_stage")
        # 17 frames are 5 latents; 1.5 joins two, so the first one is doubled
        return torch.cat([latents[:, :, :1], latents], dim=2) if self.case.is_15 else latents

    def image_latents(self, num_latents: int) -> Tensor:
        frame = self.clips()[:, :, :1]
        draw = self.rng.normal("image_noise_strength", (len(frame), 1, 1, 1, 1))
        frame = frame + torch.exp(-3 + 0.5 * draw) * self.rng.normal("image_noise", frame.shape)
        image = self.encode(frame, "image_first_stage")
        behind = torch.zeros_like(image).expand(-1, -1, num_latents - 1, -1, -1)
        is_kept = (self.rng.uniform("image_dropout") >= 0.05).view(-1, 1, 1, 1, 1)
        return torch.cat([image, behind], dim=2) * is_kept

    @torch.no_grad()
    def text(self) -> Tensor:
        labels = [path.replace("videos", "labels").replace("mp4", "txt") for path in self.paths]
        pieces = sentencepiece.SentencePieceProcessor(model_file=f"{self.files.t5}/spiece.model")
        ids = [pieces.encode(Path(label).read_text().strip()) + [1] for label in labels]
        length = 224 if self.case.is_15 else 226
        padded = torch.tensor([row + [0] * (length - len(row)) for row in ids])
        encoder = T5EncoderModel.from_pretrained(self.files.t5, dtype=self.dtype).eval()
        is_kept = (self.rng.uniform("text_dropout") >= 0.1).view(-1, 1, 1)
        return encoder(input_ids=padded).last_hidden_state * is_kept

    def alpha_sqrt(self) -> np.ndarray:
        """The scaled-linear schedule, shifted by 3 for 2B, with zero terminal SNR, in float64."""
        betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        alpha_bar = np.cumprod(1 - betas)
        shift = 3.0 if "2b" in self.case.name else 1.0
        root = np.sqrt(alpha_bar / (shift + (1 - shift) * alpha_bar))
        return (root - root[-1]) * root[0] / (root[0] - root[-1])

    @torch.no_grad()
    def losses(self, x0: Tensor, text: Tensor, image: Tensor | None, idx: Tensor) -> Tensor:
        """Weighted x0 errors [B] in float64 around diffusers' transformer."""
        a = torch.from_numpy(self.alpha_sqrt())[idx].view(-1, 1, 1, 1, 1)
        noised = a * x0 + (1 - a**2).sqrt() * self.rng.normal("noise", x0.shape)
        given = noised.float() if image is None else torch.cat([noised.float(), image], dim=1)
        folder = self.files.folder / "diffusers" / self.case.name
        network = CogVideoXTransformer3DModel.from_pretrained(folder, torch_dtype=self.dtype)
        network.norm_out.norm.eps = 1e-6
        rows, columns, frames = SIZE[0] // 16, SIZE[1] // 16, x0.shape[2]
        rotary = ofs = None
        if self.case.is_15:
            sizes = {"grid_type": "slice", "max_size": (150, 150)}
            rotary = get_3d_rotary_pos_embed(64, None, (rows, columns), frames // 2, **sizes)
            ofs = torch.tensor([2.0]) if self.case.is_i2v else None
        elif "5b" in self.case.name:
            crop = ((0, 0), (rows, columns))
            rotary = get_3d_rotary_pos_embed(64, crop, (rows, columns), frames)
        v = network(
            given.transpose(1, 2).to(self.dtype),
            text.to(self.dtype),
            idx,
            ofs=ofs,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0].transpose(1, 2)
        denoised = a * noised - (1 - a**2).sqrt() * v.double()
        return ((denoised - x0) ** 2 / (1 - a**2)).mean(dim=(1, 2, 3, 4))


def check_first_step(case: Case, files: Files, seen: FirstStep, logged: float) -> None:
    again = Again(case, files, seen.batch["paths"])
    assert torch.equal(seen.batch["mp4"].transpose(1, 2), again.clips())
    text = again.text()
    assert (text.abs().amax(dim=(1, 2)) > 0).tolist() == [False, True]
    assert (seen.text - text).abs().max() <= (1e-6 if case.is_fp32 else 0)  # the same operations
    latents = again.latents()
    assert (seen.latents - latents).abs().max() < 2e-6
    image = None
    if case.is_i2v:
        image = again.image_latents(latents.shape[2])
        assert (seen.image_latents - image).abs().max() < 2e-6
        assert image[:, :, 0].abs().max() > 0.1
    else:
        assert seen.image_latents is None
    idx = read_timesteps(case, len(latents))
    expected = again.losses(latents, text, image, idx).float()
    torch.testing.assert_close(seen.losses, expected, rtol=case.tolerance, atol=0)
    assert logged == pytest.approx(expected.mean().item(), rel=case.tolerance)


def read_timesteps(case: Case, batch: int) -> Tensor:
    """Stratified over the batch: slot s has the stratum s + rotation (mod B) of 1000 / B steps."""
    rng = SlotRandom(SEED, 0, range(batch), batch)
    rotation = int(rng.shared_unit("timestep rotation") * batch)
    strata = (torch.arange(batch) + rotation) % batch
    return ((strata + rng.uniform("timestep")) / batch * 1000).long()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.soak] * (n != QUICK)) for n in CASES]
)
def test_train_evaluate_resume_and_sample(
    name: str, files: Files, sat_configs: Path, tmp_path: Path, first_step: FirstStep, capsys
) -> None:
    case = CASES[name]
    arguments = files.training(case, sat_configs, tmp_path / "runs")
    assert main(["train", *arguments]) == 0
    run = run_folder(tmp_path / "runs")
    straight = losses(run)
    assert len(straight) == 3
    check_first_step(case, files, first_step, straight[0])

    # evaluation: held-out losses, and latents of a sample, as only_log_video_latents asks
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (evaluated,) = [line for line in lines if "valid_loss" in line]
    assert evaluated["step"] == 2
    assert all(np.isfinite(v) for v in evaluated.values())
    (sampled,) = (run / "samples" / "step-00000002").glob("*.safetensors")
    frames = 6 if case.is_15 else 3
    assert load_file(sampled)["latents"].shape == (16, frames, SIZE[0] // 8, SIZE[1] // 8)

    # the step after a checkpoint again, bitwise
    checkpoints = run / "checkpoints"
    before = read_run_weights(checkpoints / "00000003")
    # Upstream's command: `python train_video.py --base ... --seed N`
    words = [*arguments, "--resume", str(checkpoints / "00000002")]
    resumed = run_forked(["scripts/train_video.py", *words])
    assert resumed.returncode == 0, resumed.stdout
    assert losses(run) == straight
    after = read_run_weights(checkpoints / "00000003")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    is_adapter = [".matrix_" in key for key in after]
    assert all(is_adapter) if "lora" in name else not any(is_adapter)

    if name != QUICK:
        check_sampling(case, files, sat_configs, tmp_path, run)
        return
    capsys.readouterr()
    assert main(["train", *arguments, f"args.load={run}"]) == 2
    assert f"args.load={run} has 16 tensors and lacks" in capsys.readouterr().err


def check_sampling(case: Case, files: Files, sat_configs: Path, folder: Path, run: Path) -> None:
    """inference.yaml with the SAT folder, and the run by its folder."""
    image = folder / "first.png"
    Image.fromarray(decode_all(files.folder / "clips-9" / "videos" / "0.mp4")[0]).save(image)
    prompts = folder / "prompts.txt"
    prompts.write_text(CAPTIONS[0] + (f"@@{image}" if case.is_i2v else "") + "\n")

    arguments = files.sampling(case, sat_configs, files.folder / case.name, prompts)
    assert main(["sample", *arguments, f"args.output_dir={folder / 'video'}"]) == 0
    latents_only = ["args.only_save_latents=true", f"args.output_dir={folder / 'latents'}"]
    assert main(["sample", *arguments, *latents_only]) == 0
    (video,), (latents,) = (folder / "video").glob("*.mp4"), (folder / "latents").glob("*.safe*")
    frames = decode_all(video)
    assert frames.shape == (case.num_frames, *SIZE, 3)
    settings = json.loads((folder / "video" / "settings.json").read_text())
    assert settings["fps"] == 16
    assert settings["num_steps"] == 3
    z = load_file(latents)["latents"][None, :, 1 if case.is_15 else 0 :]  # padding in front goes
    with torch.no_grad():
        vae = copy.deepcopy(files.vae).to(torch.bfloat16)
        scale = 1.15258426 if "2b" in case.name else 0.7
        pixels = vae.decode((z / scale).to(torch.bfloat16)).sample[0].float()
    expected = ((pixels.clamp(-1, 1) + 1) * 127.5).permute(1, 2, 3, 0).numpy()
    # H.264 lies between, which halves the rows and columns of colours: brightness is compared
    luma = [(x @ [0.299, 0.587, 0.114]).ravel() for x in (frames, expected)]
    assert np.corrcoef(luma)[0, 1] > 0.98

    from_run = ["sample", str(run), "--prompt", CAPTIONS[0], "--out", str(folder / "of-run")]
    assert main([*from_run, *(["--image", str(image)] if case.is_i2v else [])]) == 0
    (video,) = (folder / "of-run").glob("*.mp4")
    assert decode_all(video).shape == frames.shape
