"""The folder that recorded commands run in: clips, captions, tiny models, runs and a cache.

It is made once, by the commit that is recorded, and kept as an archive. Weights are zeros where no
number matters, so that the archive is small. Paths in it are relative: commands run in a copy.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

from scripts.behaviour.difference import ROOT

SIDE = 32  # rows and columns of a clip
CAPTIONS = ("a red block moves right over grey", "a block of red goes to the right")
FAMILIES = ("2b", "5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v")
STOCK = {family: f"cogvideox{'' if '1.5' in family else '_'}{family}.yaml" for family in FAMILIES}
_TIME = 1_700_000_000  # of every file

# This makes a stock model tiny: `--base cogvideox_5b.yaml sft.yaml tiny/5b.yaml`.
_TINY = """\
model:
  network_config:
    params:
      num_frames: {frames}
      latent_height: 4
      latent_width: 4
      in_channels: {channels}
      out_channels: 8
      hidden_size: 32
      num_layers: 2
      num_attention_heads: 2
      time_embed_dim: 16{offset}
      modules:
        pos_embed_config:
          params: {position}
        patch_embed_config:
          params: {{text_hidden_size: 16}}
  conditioner_config:
    params:
      emb_models:
        - is_trainable: false
          input_key: txt
          ucg_rate: 0.1
          target: cogfast.model.text_encoder.ByteTextEncoder
          params: {{max_length: 8, d_model: 16, d_ff: 32, num_layers: 1}}
  first_stage_config: null
  sampler_config:
    params: {{num_steps: 4}}
data:
  params: {{video_size: [32, 32], fps: 8, max_num_frames: {frames}}}
args:
  experiment_name: tiny
  mode: pretrain
  load: null
  train_data: [clips]
  save: out
  train_iters: 2
  save_interval: 1000
  log_interval: 1
  num_workers: 0
  warmup_steps: 0
  activation_checkpointing: none
deepspeed:
  train_micro_batch_size_per_gpu: 2
  fp16: {{enabled: false}}
  bf16: {{enabled: false}}
  zero_optimization: {{reduce_bucket_size: 100000, allgather_bucket_size: 100000}}
"""
# A list replaces, a mapping merges: the first stage of the stock file is taken away and then set.
WAVELET = """\
model:
  first_stage_config:
    target: cogfast.model.wavelet_autoencoder.WaveletAutoencoder
    params: {ckpt_path: clips/wavelet.safetensors}
"""


def tiny_files(family: str) -> list[str]:
    """Return the files of --base that make a tiny model of a family, in this folder."""
    return [STOCK[family], "sft.yaml", f"tiny/{family}.yaml", "tiny/wavelet.yaml"]


def tiny_text(family: str) -> str:
    """Return the file that makes the stock model of a family tiny."""
    head = "" if family == "2b" else ", hidden_size_head: 16"
    return _TINY.format(
        offset="\n      ofs_embed_dim: 16" if family == "1.5_5b_i2v" else "",
        frames=17 if "1.5" in family else 9,
        channels=16 if "i2v" in family else 8,
        position=f"{{text_length: 8{head}}}",
    )


def write_world(archive: Path, work: Path) -> None:
    """Make the folder and pack it."""
    world = work / "world"
    world.mkdir()
    _write_clips(world / "clips")
    _write_tiny(world / "tiny")
    _write_pipelines(world)
    base = ["--base", *tiny_files("5b")]
    _cogfast(world, "train", *base, "args.eval_prompts=[a red block]", "args.eval_interval=2")
    _keep_run(world, "full")
    _cogfast(world, "train", *base, "--lora", "4", "args.load=runs/full")
    _keep_run(world, "lora")
    _cogfast(world, "cache", *base, "args.latent_cache=cache")
    _cogfast(world, "convert", "runs/full", "sat", "--to", "sat")
    _cogfast(world, "convert", "runs/lora", "adapters", "--to", "peft")
    for name in ("out", "home", "t5"):
        shutil.rmtree(world / name, ignore_errors=True)
    sources = world / "cache" / "sources.jsonl"
    sources.write_text(sources.read_text().replace(str(world), "/recorded"))
    pack(world, archive)


def pack(folder: Path, archive: Path) -> None:
    """Write a .tar.xz that depends on nothing but the files."""
    buffer, first = io.BytesIO(), {}  # {content: the first file that has it}
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9) as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, path.relative_to(folder).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = _TIME + (10 if "lora" in info.name else 0)
            info.mode = 0o755 if path.is_dir() else 0o644
            content = path.read_bytes() if path.is_file() else b""
            if content and (same := first.setdefault(content, info.name)) != info.name:
                info.type, info.linkname, info.size, content = tarfile.LNKTYPE, same, 0, b""
            tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(buffer.getvalue())


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive of `pack` with its times and modes."""
    with tarfile.open(archive) as tar:
        with suppress(AttributeError):  # Python 3.11.3 and earlier have none
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
    return folder


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a recorded command: nothing of the user's but Python's.

    No program is found, neither git nor nvidia-smi nor a compiler: a run takes PyTorch's ops, on each
    machine the same.
    """
    kept = ("PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": "/nowhere",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "80",
        "LINES": "24",
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _cogfast(world: Path, *words: str) -> None:
    home = world / "home"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    python = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "cogfast", *words],
        cwd=world,
        env={**environment(home), **python},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"cogfast {' '.join(words)}: {done.stderr[-2000:]}")


def _keep_run(world: Path, name: str) -> None:
    (run,) = (world / "out").iterdir()
    (world / "runs").mkdir(exist_ok=True)
    run.rename(world / "runs" / name)


def _write_clips(folder: Path) -> None:
    import av
    import numpy as np

    for name in ("videos", "labels"):
        (folder / name).mkdir(parents=True)
    for i, caption in enumerate(CAPTIONS):
        with av.open(str(folder / "videos" / f"{i}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=8, options={"threads": "1"})
            stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
            for t in range(17):
                picture = np.full((SIDE, SIDE, 3), 40 + 8 * (t % 12), np.uint8)
                picture[:8, t : t + 8] = (255, 0, 30 * i)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        (folder / "labels" / f"{i}.txt").write_text(f"{caption}\n")
    (folder / "prompts.txt").write_text("".join(f"{text}\n" for text in CAPTIONS))
    (folder / "videos.txt").write_text("videos/0.mp4\nvideos/1.mp4\n")
    rows = (f'{{"path": "videos/{i}.mp4", "caption": "{c}"}}\n' for i, c in enumerate(CAPTIONS))
    (folder / "rows.jsonl").write_text("".join(rows))
    _write_wavelet(folder / "wavelet.safetensors")


def _write_wavelet(file: Path) -> None:
    """The first eight bands, neither centred nor scaled; docs of the format: its metadata."""
    import torch
    from safetensors.torch import save_file

    tensors = {"bands": torch.arange(8), "mean": torch.zeros(8), "scale": torch.ones(8)}
    save_file(tensors, file, {"format": "cogfast-wavelet-1", "num_bands": "768"})


def _write_tiny(folder: Path) -> None:
    folder.mkdir()
    for family in FAMILIES:
        position = (
            "{text_length: 8}" if family == "2b" else "{text_length: 8, hidden_size_head: 16}"
        )
        text = _TINY.format(
            frames=17 if "1.5" in family else 9,
            channels=16 if "i2v" in family else 8,
            position=position,
        )
        (folder / f"{family}.yaml").write_text(text)
    (folder / "wavelet.yaml").write_text(WAVELET)


def _write_pipelines(world: Path) -> None:
    """Folders of diffusers for each family, with zeros as weights."""
    import sentencepiece
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXImageToVideoPipeline,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    t5 = world / "t5"
    t5.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS),
        model_writer=model,
        vocab_size=26,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (t5 / "spiece.model").write_bytes(model.getvalue())
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    encoder = T5EncoderModel(T5Config(vocab_size=160, feed_forward_proj="gated-gelu", **sizes))
    _zero(encoder).save_pretrained(t5)
    vae = AutoencoderKLCogVideoX(block_out_channels=(32, 32, 32, 32), layers_per_block=1)
    vae.register_to_config(scaling_factor=0.7)
    for family in FAMILIES:
        is_15, is_i2v = "1.5" in family, "i2v" in family
        transformer = CogVideoXTransformer3DModel(
            num_attention_heads=2,
            in_channels=32 if is_i2v else 16,
            out_channels=16,
            ofs_embed_dim=512 if is_15 and is_i2v else None,
            text_embed_dim=32,
            num_layers=2,
            sample_height=SIDE // 8,
            sample_width=SIDE // 8,
            sample_frames=17 if is_15 else 9,
            patch_size_t=2 if is_15 else None,
            patch_bias=not is_15,
            max_text_seq_length=224 if is_15 else 226,
            use_rotary_positional_embeddings=family != "2b",
            use_learned_positional_embeddings=family == "5b_i2v",
        )
        scheduler = CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            snr_shift_scale=3.0 if family == "2b" else 1.0,
        )
        kind = CogVideoXImageToVideoPipeline if is_i2v else CogVideoXPipeline
        kind(
            tokenizer=AutoTokenizer.from_pretrained(t5),
            text_encoder=encoder,
            vae=_zero(vae),
            transformer=_zero(transformer),
            scheduler=scheduler,
        ).save_pretrained(world / "models" / family)


def _zero(model):
    for value in model.state_dict().values():
        value.zero_()
    return model
