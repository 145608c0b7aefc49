"""The examples of the documentation, as they are written on the day of the recording, and what they run with."""

from __future__ import annotations

import re

from scripts.behaviour.difference import ROOT
from scripts.behaviour.words.world import tiny_files

_BASE = ["--base", *tiny_files("5b")]
_TRAIN = """
from cogfast.config import load_config
load_config_of = {files!r}, {words!r}
{name}(load_config(*load_config_of)).train()
"""
# Files that examples read: noise and a flow for each clip, and low quality clips.
_TENSORS = """
import json
from pathlib import Path
import numpy as np
rows = []
for i in range(2):
    row = {{"path": f"videos/{{i}}.mp4", "caption": f"clip {{i}}", "{name}": f"{name}/{{i}}.npy"}}
    file = Path("clips") / row["{name}"]
    file.parent.mkdir(exist_ok=True)
    np.save(file, np.random.default_rng(i).standard_normal({shape}).astype("float32"))
    rows.append(json.dumps(row))
Path("clips/{name}.jsonl").write_text("\\n".join(rows))
"""
_LOW = """
import shutil
from pathlib import Path
Path("low").mkdir(exist_ok=True)
for i in range(2):
    shutil.copy(f"clips/videos/{i}.mp4", f"low/{i}.mp4")
Path("clips/low").mkdir(exist_ok=True)
for i in range(2):
    shutil.copy(f"clips/videos/{i}.mp4", f"clips/low/{i}.mp4")
"""


def examples() -> dict[str, dict]:
    """{name: code, what runs before and after it, the words of its command line, its run's folder}."""
    extending, library, finetune = (_codes(name) for name in ("extending", "library", "finetune"))
    found: dict[str, dict] = {"library": {"code": "\n".join(library)}}

    def code_of(texts: list[str], name: str) -> str:
        (code,) = (text for text in texts if f"class {name}(" in text)
        return code

    for name in ("PixelLoss", "FeatureLoss"):
        after = _TRAIN.format(files=_BASE[1:], words=[f"args.save=out/{name}"], name=name)
        found[name] = {"code": code_of(extending, name), "after": after, "run": f"out/{name}"}
    found["WeightByTimestep"] = {
        "code": code_of(extending, "WeightByTimestep"),
        "run_as": "__main__",
        "words": [*_BASE, "args.save=out/weighted"],
        "run": "out/weighted",
    }
    found["WarpedNoise"] = {
        "code": code_of(extending, "WarpedNoise"),
        "before": [_TENSORS.format(name="noise", shape=(8, 3, 4, 4))],
        "run_as": "__main__",
        "words": [*_BASE, *_manifest("noise", "[8, 3, 4, 4]"), "args.save=out/warped"],
        "run": "out/warped",
    }
    words = [*_manifest("flow", "[2, 3, 4, 4]"), "args.save=out/trajectory"]
    words += ["model.network_config.target=mymodel.TrajectoryTransformer"]
    words += ["model.trainable_modules=[fuser, traj_extractor]", "args.load=runs/full"]
    after = "from cogfast.__main__ import main\n"
    after += f"assert main(['train', *{[*_BASE, '--allow-import', 'mymodel', *words]!r}]) == 0\n"
    found["TrajectoryTransformer"] = {
        "code": code_of(extending, "TrajectoryTransformer"),
        "before": [_TENSORS.format(name="flow", shape=(2, 3, 4, 4))],
        "file": "mymodel.py",
        "after": after,
        "run": "out/trajectory",
    }
    options = (
        "--model_path models/5b --model_name cogvideox-t2v --model_type t2v --training_type lora"
    )
    options += " --output_dir out/dove --data_root clips --caption_column prompts.txt"
    options += " --video_column videos.txt --train_resolution 9x32x32 --rank 4 --train_steps 2"
    options += " --num_workers 0 --batch_size 2 --latent_cache none --sr_noise_step 399"
    options += " --report_to tensorboard args.log_interval=1 args.force_train=true"
    options += " deepspeed.zero_optimization.reduce_bucket_size=100000"
    found["SuperResolution"] = {
        "code": code_of(finetune, "SuperResolution"),
        "before": [_LOW],
        "run_as": "__main__",
        "words": options.split(),
        "run": "out/dove",
    }
    return found


def _manifest(name: str, shape: str) -> list[str]:
    """Words that read the clips by a manifest, with a tensor for each."""
    data = "{target: cogfast.data.datasets.VideoManifest, params: {video_size: [32, 32], fps: 8, "
    data += f"max_num_frames: 9, tensors: {{{name}: {shape}}}}}}}"
    return [f"args.train_data=[clips/{name}.jsonl]", f"data={data}"]


def _codes(name: str) -> list[str]:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)
