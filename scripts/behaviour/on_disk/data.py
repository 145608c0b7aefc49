"""Writes what the recorded runs start from: clips in every layout, configurations, and a user's modules.

Only a recording calls it: a comparison reads the files that it wrote.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import av
import numpy as np
import torch
import yaml
from PIL import Image

from scripts.quickstart_wavelet import fit_wavelet, save_wavelet

SIDE, FRAMES, CHANNELS, CLIPS = 32, 13, 8, 6
FAMILIES = ("2b", "5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v")

_OWN_NETWORK = '''"""A network, a text encoder and a trainer of a user."""

import torch
from torch import nn

from cogfast.model.block import Block
from cogfast.model.text_encoder import ByteTextEncoder
from cogfast.model.transformer import DiffusionTransformer


class FusedBlock(Block):
    def __init__(self, width, *others, **named):
        super().__init__(width, *others, **named)
        self.fuser = nn.Linear(width, 2 * width)
        nn.init.zeros_(self.fuser.weight)
        nn.init.zeros_(self.fuser.bias)

    def forward(self, hidden, conditioning, num_text, rotation, motion=None):
        if motion is not None:
            scale, shift = self.fuser(motion).chunk(2, dim=-1)
            text, video = hidden[:, :num_text], hidden[:, num_text:]
            hidden = torch.cat([text, video * (1 + scale) + shift], dim=1)
        return super().forward(hidden, conditioning, num_text, rotation)


class TrajectoryTransformer(DiffusionTransformer):
    block_class = FusedBlock

    def __init__(self, config):
        super().__init__(config)
        patch = (config.patch_size.t, config.patch_size.h, config.patch_size.w)
        self.traj_extractor = nn.Conv3d(2, config.hidden_size, patch, stride=patch)

    def block_arguments(self, tensors, grid):
        motion = self.traj_extractor(tensors["flow"].to(self.dtype))
        return [[motion.flatten(2).transpose(1, 2)]] * len(self.blocks)


class Shouting(ByteTextEncoder):
    """The embeddings of captions in capitals."""

    def forward(self, prompts):
        return super().forward([prompt.upper() for prompt in prompts])
'''

_OWN_TRAINER = """import sys

from cogfast.__main__ import main
from cogfast.train.trainer import Trainer


class WeightByTimestep(Trainer):
    def losses(self, batch, noised, conditioning):
        weight = 1 + (noised.timesteps >= 500).float()
        return weight * super().losses(batch, noised, conditioning)

    def add_noise(self, batch, latents, rng):
        return self.loss.add_noise(latents, rng, noise=batch["noise"])


if __name__ == "__main__":
    sys.exit(main(trainer=WeightByTimestep))
"""

_OWN_FINETUNE = '''"""A trainer of CogVideo's diffusers trainer, with an encoder and a loss of its own."""

import torch.nn.functional as F

from cogfast.finetune import Args
from cogfast.finetune.models.cogvideox_t2v.lora_trainer import CogVideoXT2VLoraTrainer


class Mine(CogVideoXT2VLoraTrainer):
    def encode_video(self, video):
        return 0.5 * super().encode_video(video.flip(2))


if __name__ == "__main__":
    Mine(Args.parse_args()).fit()
'''

# Writes what a run gives to W&B into a file.
_FAKE_WANDB = '''"""Stands for W&B: writes what it gets into the file COGFAST_WANDB."""

import json
import os


def _write(what, values):
    with open(os.environ["COGFAST_WANDB"], "a") as file:
        file.write(json.dumps([what, values], default=lambda value: type(value).__name__) + "\\n")


class Video:
    def __init__(self, path, **named):
        _write("Video", {"file": os.path.basename(str(path)), **named})


class Run:
    def define_metric(self, *given, **named):
        _write("define_metric", {"given": given, **named})

    def log(self, values, **named):
        _write("log", {**values, **named})

    def finish(self, **named):
        _write("finish", named)


def init(**named):
    named["config"] = sorted(named.get("config") or {})
    named["dir"] = bool(named.get("dir"))
    _write("init", named)
    return Run()
'''


def write_data(root: Path) -> None:
    """Write everything below data/, configs/, own/ and fakes/ of `root`."""
    clips = [_clip(number) for number in range(CLIPS)]
    _write_clips(root / "data" / "clips", clips)
    _write_clips(root / "data" / "unread", clips[:3])
    pixels = [torch.from_numpy(c).permute(3, 0, 1, 2)[None].float() / 127.5 - 1 for c in clips]
    save_wavelet(fit_wavelet(pixels, CHANNELS), root / "data" / "wavelet.safetensors")
    _write_lists(root / "data" / "lists", clips)
    _write_manifests(root / "data" / "lists")
    _write_shards(root / "data" / "shards", root / "data" / "lists")
    for family in FAMILIES:
        _write_yaml(root / "configs" / f"{family}.yaml", {"model": _model(family)})
    model = _model("5b")
    model["first_stage_config"] = {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": "data/pipeline"},
    }
    model["network_config"]["params"] |= {"in_channels": 16, "out_channels": 16}
    _write_yaml(root / "configs" / "5b_vae.yaml", {"model": model})
    _write_yaml(root / "configs" / "sft.yaml", _training())
    for folder, name, text in (
        ("own", "own_network.py", _OWN_NETWORK),
        ("own", "own_trainer.py", _OWN_TRAINER),
        ("own", "own_finetune.py", _OWN_FINETUNE),
        ("fakes", "wandb.py", _FAKE_WANDB),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text)
    _write_pipeline(root / "data" / "pipeline")


def _clip(number: int) -> np.ndarray:
    """Return a bright bar that moves over noise, uint8 [F, H, W, 3]."""
    frames = np.random.default_rng(number).integers(0, 60, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
    for t in range(FRAMES):
        start = (2 * t + 5 * number) % (SIDE - 6)
        frames[t, :, start : start + 6, number % 3] = 230
    return frames


def _write_video(path: Path, frames: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=8, options={"crf": "24", "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))


def _write_clips(folder: Path, clips: list[np.ndarray]) -> None:
    for number, frames in enumerate(clips):
        _write_video(folder / "videos" / f"{number}.mp4", frames)
        label = folder / "labels" / f"{number}.txt"
        label.parent.mkdir(exist_ok=True)
        label.write_text(f"bar number {number} moves\n")


def _write_lists(folder: Path, clips: list[np.ndarray]) -> None:
    """Write the lists of CogVideo's diffusers trainer, with controls, masks and first frames."""
    columns: dict[str, list[str]] = {"videos": [], "controls": [], "masks": [], "images": []}
    for number, frames in enumerate(clips):
        _write_video(folder / "clips" / f"{number}.mp4", frames)
        _write_video(folder / "controls" / f"{number}.mp4", 255 - frames)
        mask = np.zeros_like(frames)
        mask[:, :, : SIDE // 2 if number % 2 else SIDE // 4] = 255
        _write_video(folder / "masks" / f"{number}.mp4", mask)
        (folder / "images").mkdir(exist_ok=True)
        Image.fromarray(frames[0, ::-1]).save(folder / "images" / f"{number}.png")
        columns["videos"].append(f"clips/{number}.mp4")
        columns["controls"].append(f"controls/{number}.mp4")
        columns["masks"].append(f"masks/{number}.mp4")
        columns["images"].append(f"images/{number}.png")
        for name, shape in (("noise", [CHANNELS, 3, 4, 4]), ("flow", [2, 3, 4, 4])):
            values = np.random.default_rng([number, len(name)]).standard_normal(shape)
            (folder / name).mkdir(exist_ok=True)
            np.save(folder / name / f"{number}.npy", values.astype(np.float16))
    columns["prompts"] = [f"bar number {number} moves" for number in range(len(clips))]
    for name, lines in columns.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    Image.fromarray(mask[0]).save(folder / "mask.png")


def _write_manifests(folder: Path) -> None:
    """Write the same clips as a table in JSON lines, as CSV, and as VideoX-Fun's list."""
    rows, theirs = [], []
    for number in range(CLIPS):
        row = {
            "path": f"clips/{number}.mp4",
            "caption": f"bar number {number} moves",
            "control": f"controls/{number}.mp4",
            "mask": f"masks/{number}.mp4",
            "noise": f"noise/{number}.npy",
            "flow": f"flow/{number}.npy",
            "weight": 1 + number % 2,
            "split": "valid" if number == 5 else "train",
        }
        rows.append(row)
        theirs.append(
            {"file_path": row["path"], "text": row["caption"], "control_file_path": row["control"]}
            | {"type": "video"}
        )
    spans = [{**row, "start": 0.0, "end": 1.5, "fps": 8} for row in rows[:4]]
    prior = [{**row, "prior": number in (0, 3)} for number, row in enumerate(rows)]
    for name, table in (("table", rows), ("prior", prior), ("spans", spans)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table))
    (folder / "theirs.json").write_text(json.dumps(theirs))
    lines = [f"{row['path']},{row['caption']}" for row in rows]
    bad = ["clips/broken.mp4,a clip that is broken"]
    (folder / "clips" / "broken.mp4").write_bytes((folder / "clips" / "0.mp4").read_bytes()[:900])
    (folder / "table.csv").write_text("\n".join(["path,caption", *lines, *bad]) + "\n")


def _write_shards(folder: Path, lists: Path) -> None:
    folder.mkdir()
    for shard, numbers in enumerate((range(3), range(3, CLIPS))):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as file:
            for number in numbers:
                members = {
                    "mp4": (lists / "clips" / f"{number}.mp4").read_bytes(),
                    "control.mp4": (lists / "controls" / f"{number}.mp4").read_bytes(),
                    "txt": f"bar number {number} moves".encode(),
                }
                for kind, content in members.items():
                    about = tarfile.TarInfo(f"{number}.{kind}")
                    about.size = len(content)
                    file.addfile(about, io.BytesIO(content))


def _write_yaml(path: Path, sections: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    # Aliases would be one value in two places.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    path.write_text(yaml.dump(sections, Dumper=dumper, sort_keys=False))


def _schedule() -> dict:
    target = "sgm.modules.diffusionmodules.discretizer.ZeroSNRDDPMDiscretization"
    return {"target": target, "params": {"shift_scale": 1.0}}


def _model(family: str) -> dict:
    """Return a member of the family with width 16, 2 layers, 1 head, in SAT's own keys."""
    is_15, is_i2v = family.startswith("1.5"), family.endswith("i2v")
    concat, sgm = "dit_video_concat", "sgm.modules.diffusionmodules"
    position = {"target": f"{concat}.Basic3DPositionEmbeddingMixin", "params": {"text_length": 8}}
    if family != "2b":
        position["target"] = f"{concat}.Rotary3DPositionEmbeddingMixin"
        position["params"]["hidden_size_head"] = 16
    if family == "5b_i2v":
        position["params"]["learnable_pos_embed"] = True
    patch = {"text_hidden_size": 16}
    network = {
        "num_frames": 17 if is_15 else 9,
        "time_compressed_rate": 4,
        "latent_height": SIDE // 8,
        "latent_width": SIDE // 8,
        "patch_size": [2, 2, 2] if is_15 else 2,
        "in_channels": CHANNELS * (2 if is_i2v else 1),
        "out_channels": CHANNELS,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 1,
        "time_embed_dim": 8,
        "elementwise_affine": True,
        "transformer_args": {"checkpoint_activations": False},
        "modules": {
            "pos_embed_config": position,
            "patch_embed_config": {
                "target": f"{concat}.ImagePatchEmbeddingMixin",
                "params": patch,
            },
            "adaln_layer_config": {"target": f"{concat}.AdaLNMixin", "params": {"qk_ln": True}},
            "final_layer_config": {"target": f"{concat}.FinalLayerMixin"},
        },
    }
    if family == "1.5_5b_i2v":
        network["ofs_embed_dim"] = 8
    denoiser = {
        "num_idx": 1000,
        "scaling_config": {"target": f"{sgm}.denoiser_scaling.VideoScaling"},
        "discretization_config": _schedule(),
    }
    text = {
        "is_trainable": False,
        "input_key": "txt",
        "ucg_rate": 0.1,
        "target": "cogfast.model.text_encoder.ByteTextEncoder",
        "params": {"max_length": 8, "d_model": 16, "d_ff": 32, "num_layers": 1},
    }
    timesteps = {
        "uniform_sampling": True,
        "num_idx": 1000,
        "discretization_config": _schedule(),
    }
    sampler = {
        "num_steps": 4,
        "discretization_config": _schedule(),
        "guider_config": {"target": f"{sgm}.guiders.VanillaCFG", "params": {"scale": 3.0}},
    }
    section = {
        "scale_factor": 0.7,
        "denoiser_config": {"target": f"{sgm}.denoiser.DiscreteDenoiser", "params": denoiser},
        "network_config": {"target": f"{concat}.DiffusionTransformer", "params": network},
        "conditioner_config": {
            "target": "sgm.modules.GeneralConditioner",
            "params": {"emb_models": [text]},
        },
        "first_stage_config": {
            "target": "cogfast.model.wavelet_autoencoder.WaveletAutoencoder",
            "params": {"ckpt_path": "data/wavelet.safetensors"},
        },
        "loss_fn_config": {
            "target": f"{sgm}.loss.VideoDiffusionLoss",
            "params": {
                "sigma_sampler_config": {
                    "target": f"{sgm}.sigma_sampling.DiscreteSampling",
                    "params": timesteps,
                }
            },
        },
        "sampler_config": {"target": f"{sgm}.sampling.VPSDEDPMPP2MSampler", "params": sampler},
    }
    if is_i2v:
        section |= {"noised_image_input": True, "noised_image_dropout": 0.3}
    return section


def _training() -> dict:
    """Return the keys of a run: 4 samples per step, float32, ZeRO-2, a rate that depends on the step."""
    return {
        "args": {
            "experiment_name": "tiny",
            "mode": "pretrain",
            "train_data": ["data/clips"],
            "save": "runs",
            "train_iters": 7,
            "save_interval": 1000,
            "keep_last": 1,
            "log_interval": 1,
            "num_workers": 0,
            "batch_size": 4,
            "lr_schedule": "cosine",
            "warmup_steps": 2,
            "min_lr_ratio": 0.1,
        },
        "data": {
            "target": "data_video.SFTDataset",
            "params": {
                "video_size": [SIDE, SIDE],
                "fps": 8,
                "max_num_frames": 9,
                "skip_frms_num": 0,
            },
        },
        "deepspeed": {
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 100_000,
                "allgather_bucket_size": 100_000,
            },
            "optimizer": {
                "type": "sat.ops.FusedEmaAdam",
                "params": {"lr": 2e-3, "weight_decay": 1e-4},
            },
        },
    }


def _write_pipeline(folder: Path) -> None:
    """Write a tiny pipeline of CogVideoX-5B with diffusers."""
    import sentencepiece
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    vocabulary = folder.with_name("t5")
    vocabulary.mkdir()
    pieces = io.BytesIO()
    captions = [
        "a red block moves right over grey",
        "a block of red goes to the right",
        "grey, and a red block that moves",
        "the red block moves over a grey wall",
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(captions),
        model_writer=pieces,
        vocab_size=34,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2},
    )
    (vocabulary / "spiece.model").write_bytes(pieces.getvalue())
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=160, feed_forward_proj="gated-gelu", **sizes)
    config.save_pretrained(vocabulary)
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    shutil.rmtree(vocabulary)
    torch.manual_seed(0)
    text = T5EncoderModel(config)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    )
    vae.register_to_config(scaling_factor=0.7)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=16,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_height=SIDE // 8,
        sample_width=SIDE // 8,
        sample_frames=9,
        max_text_seq_length=226,
        use_rotary_positional_embeddings=True,
    )
    scheduler = CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=1.0,
    )
    pipeline = CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text,
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )
    pipeline.save_pretrained(folder)
