"""Tiny runs for the tests: clips, configs of every family, launches with one or more processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import yaml

from cogfast.extensions.sample.writer import write_video
from cogfast.model.weights.run_checkpoint import open_run
from scripts.quickstart_wavelet import fit_wavelet, save_wavelet
from tests.support.ranks.forked import ROOT, Forked, run_forked

CHANNELS = 8  # latent channels of the tiny first stage
SIDE = 32  # rows and columns of the tiny clips
Started = subprocess.Popen | Forked
_PORTS: deque[socket.socket] = deque(maxlen=100)  # that this process holds
FAMILIES = ("2b", "5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v")


def write_clips(folder: Path, num_clips: int = 6, num_frames: int = 17) -> Path:
    """H.264 clips of a bright bar that moves over noise, captions, and the wavelet fitted to them."""
    videos = []
    for i in range(num_clips):
        rng = np.random.default_rng(i)
        frames = rng.integers(0, 90, (num_frames, SIDE, SIDE, 3), dtype=np.uint8)
        for t in range(num_frames):
            start = (2 * t + 5 * i) % (SIDE - 6)
            frames[t, :, start : start + 6, i % 3] = 230
        write_video(folder / "videos" / f"{i}.mp4", frames, fps=8)
        label = folder / "labels" / f"{i}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text(f"bar number {i} moves\n")
        videos.append(torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1)
    save_wavelet(fit_wavelet(videos, CHANNELS), folder / "wavelet.safetensors")
    return folder


def write_clips_with_vae(folder: Path, num_clips: int, latent_channels: int) -> Path:
    """The clips of write_clips, and a small VAE with random weights in vae/."""
    from diffusers import AutoencoderKLCogVideoX

    write_clips(folder, num_clips)
    torch.manual_seed(0)
    AutoencoderKLCogVideoX(
        block_out_channels=(32, 32, 32, 32), layers_per_block=1, latent_channels=latent_channels
    ).save_pretrained(folder / "vae")
    return folder


def part(target: str, **params: object) -> dict:
    return {"target": target, "params": params} if params else {"target": target}


def schedule() -> dict:
    discretizer = "sgm.modules.diffusionmodules.discretizer"
    return part(f"{discretizer}.ZeroSNRDDPMDiscretization", shift_scale=1.0)


def model_section(family: str, data: Path, lora_rank: int | None = None) -> dict:
    """A member of the family with width 32, 2 layers, 2 heads, in SAT's own keys."""
    is_15, is_i2v = family.startswith("1.5"), family.endswith("i2v")
    mixins, diffusion = "dit_video_concat", "sgm.modules.diffusionmodules"
    rotary = f"{mixins}.Rotary3DPositionEmbeddingMixin"
    position = part(rotary, hidden_size_head=16, text_length=8)
    if family == "2b":
        position = part(f"{mixins}.Basic3DPositionEmbeddingMixin", text_length=8)
    if family == "5b_i2v":
        position["params"]["learnable_pos_embed"] = True
    modules = {
        "pos_embed_config": position,
        "patch_embed_config": part(f"{mixins}.ImagePatchEmbeddingMixin", text_hidden_size=16),
        "adaln_layer_config": part(f"{mixins}.AdaLNMixin", qk_ln=True),
        "final_layer_config": part(f"{mixins}.FinalLayerMixin"),
    }
    if lora_rank is not None:
        modules["lora_config"] = part("sat.model.finetune.lora2.LoraMixin", r=lora_rank)
    network = {
        "num_frames": 17 if is_15 else 9,
        "time_compressed_rate": 4,
        "latent_height": SIDE // 8,
        "latent_width": SIDE // 8,
        "patch_size": [2, 2, 2] if is_15 else 2,
        "in_channels": CHANNELS * (2 if is_i2v else 1),
        "out_channels": CHANNELS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "time_embed_dim": 16,
        "elementwise_affine": True,
        "transformer_args": {"checkpoint_activations": False},
        "modules": modules,
    }
    if family == "1.5_5b_i2v":
        network["ofs_embed_dim"] = 16
    t5 = "cogfast.model.text_encoder.ByteTextEncoder"
    encoder = part(t5, max_length=8, d_model=16, d_ff=32, num_layers=1)
    encoder |= {"is_trainable": False, "input_key": "txt", "ucg_rate": 0.1}
    timesteps = part(
        f"{diffusion}.sigma_sampling.DiscreteSampling",
        uniform_sampling=True,
        num_idx=1000,
        discretization_config=schedule(),
    )
    section = {
        "scale_factor": 0.7,
        "denoiser_config": part(
            f"{diffusion}.denoiser.DiscreteDenoiser",
            num_idx=1000,
            scaling_config=part(f"{diffusion}.denoiser_scaling.VideoScaling"),
            discretization_config=schedule(),
        ),
        "network_config": part(f"{mixins}.DiffusionTransformer", **network),
        "conditioner_config": part("sgm.modules.GeneralConditioner", emb_models=[encoder]),
        "first_stage_config": part(
            "cogfast.model.wavelet_autoencoder.WaveletAutoencoder",
            ckpt_path=str(data / "wavelet.safetensors"),
        ),
        "loss_fn_config": part(
            f"{diffusion}.loss.VideoDiffusionLoss", sigma_sampler_config=timesteps
        ),
        "sampler_config": part(
            f"{diffusion}.sampling.VPSDEDPMPP2MSampler",
            num_steps=4,
            discretization_config=schedule(),
            guider_config=part(f"{diffusion}.guiders.VanillaCFG", scale=3.0),
        ),
    }
    if is_i2v:
        section |= {"noised_image_input": True, "noised_image_dropout": 0.3}
    if lora_rank is not None:
        section["not_trainable_prefixes"] = ["all"]
    return section


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    def ignore_aliases(self, data: object) -> bool:
        return True


def write_config(
    path: Path,
    data: Path,
    family: str = "5b",
    lora_rank: int | None = None,
    has_vae: bool = False,
    dataset: dict | None = None,
    optimizer: str = "sat.ops.FusedEmaAdam",
    **args: object,
) -> Path:
    """A whole config: 4 samples per step, float32, ZeRO-2; `args` replace those of `args`.

    has_vae: the first stage is the VAE of write_clips_with_vae in place of the wavelet, which has no
    variance. dataset: the `data` section instead of the folder of clips.
    """
    model = model_section(family, data, lora_rank)
    if has_vae:
        target = "cogfast.model.autoencoder.VideoAutoencoder"
        model["first_stage_config"] = part(target, path=str(data / "vae"))
    sections = {
        "model": model,
        "args": {
            "experiment_name": "tiny",
            "mode": "pretrain",
            "train_data": [str(data)],
            "save": str(path.parent / "runs"),
            "train_iters": 4,
            "save_interval": 1000,
            "log_interval": 1,
            "num_workers": 0,
            "lr_schedule": "constant",
            "warmup": 0.0,
            **args,
        },
        "data": dataset
        or part(
            "data_video.SFTDataset",
            video_size=[SIDE, SIDE],
            fps=8,
            max_num_frames=17 if family.startswith("1.5") else 9,
        ),
        "deepspeed": {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 100_000,
                "allgather_bucket_size": 100_000,
            },
            "optimizer": {"type": optimizer, "params": {"lr": 2e-3, "weight_decay": 1e-4}},
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.dump(sections, Dumper=_Dumper, sort_keys=False)
    if not path.is_file() or path.read_text() != text:  # a process may be reading it
        path.write_text(text)
    return path


def free_port() -> int:
    """Return a port that no other launch of any test process on this machine is given, nor a connection.

    It lies below those that the system gives to connections. Its namesake of UDP, which nothing uses, is held
    until this process ends or has asked for a hundred more.
    """
    for port in range(20_000, 30_000):
        held, probe = socket.socket(type=socket.SOCK_DGRAM), socket.socket()
        with probe, suppress(OSError):
            held.bind(("127.0.0.1", port))
            probe.bind(("", port))
            _PORTS.append(held)
            return port
    raise RuntimeError("no port is free")


def torchrun(processes: int) -> list[str]:
    """torchrun's command on a port that is free, without what it is to run."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={processes}",
        f"--master_port={free_port()}",
    ]


def launch_ranks(processes: int, *arguments: str) -> str:
    """Run `python ARGUMENTS` on so many gloo processes; it must succeed. Return the output."""
    done = run_forked(arguments, processes, free_port())
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(
    arguments: list[str], processes: int = 1, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Run `cogfast ARGUMENTS` in forked processes; stdout and stderr together in .stdout."""
    return run_forked(["-m", "cogfast", *arguments], processes, free_port(), timeout)


def start(arguments: list[str], processes: int = 1, is_fresh: bool = False) -> Started:
    """Start `cogfast ARGUMENTS`, under torchrun where there is more than one process.

    is_fresh: start Python itself, as a user does, and not in a forked process.
    """
    return start_program(["-m", "cogfast", *arguments], processes, is_fresh)


def start_program(program: list[str], processes: int = 1, is_fresh: bool = False) -> Started:
    """Start `python PROGRAM` as `start` does."""
    command = [*torchrun(processes)[1:], *program] if processes > 1 else program
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not is_fresh:
        return Forked(command, environment)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_program(
    program: list[str], processes: int = 1, timeout: float = 240
) -> subprocess.CompletedProcess:
    """Run `python PROGRAM` to its end, under torchrun where there is more than one process."""
    process = start_program(program, processes)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def wait_for(
    path_exists: Callable[[], object], process: Started, timeout: float = 120, pause: float = 0.05
) -> None:
    """Wait until `path_exists()`; the process must not end before."""
    end = time.monotonic() + timeout
    while not path_exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "timed out"
        time.sleep(pause)


def run_folder(save: Path) -> Path:
    """The only run below a `save` folder."""
    (folder,) = [path for path in save.iterdir() if path.is_dir()]
    return folder


def losses(folder: Path) -> list[float]:
    """The training losses of a run, a number per logged step."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def read_run_weights(checkpoint: Path | str, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return every parameter of a run's checkpoint, whole and in float32."""
    source = open_run(Path(checkpoint), ema)
    return {name: source.read(name, None) for name in source.shapes}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Both have tensors of the same names, which are equal bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
