"""Compare the predicted peak of a training step with that of PyTorch's allocator, at full size.

    python -m bench.checks.plan_against_allocator {2b,5b,1.5_5b,5b_i2v,1.5_5b_i2v} {sft,lora} [key=value ...]

Two steps run on latents and embeddings without a VAE; weights are left as they lie, and nothing is
saved. It needs a GPU with room for the model, or a CUDA runtime that only counts memory. Prints a JSON
line for the second step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from cogfast.config import Config, load_config
from cogfast.schema.arguments import TrainArguments
from cogfast.train import assembly, trainer
from cogfast.train.plan.memory import GIB, MemoryPlan, plan_memory, setup_of

# Frames, rows and columns of a clip, its latents [C, T, h, w], and its caption's embedding [L, E]
SHAPES = {
    "2b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "5b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "1.5_5b": ((81, 768, 1360), [16, 22, 96, 170], [224, 4096]),
}
SHAPES |= {f"{name}_i2v": SHAPES[name] for name in ("5b", "1.5_5b")}
_NUM_STEPS = 2


def load(model: str, mode: str, words: list[str], folder: Path) -> tuple[Config, Config]:
    """Return the configuration to run, whose data are latents, and the one to plan, with their clips."""
    (frames, rows, columns), latents, text = SHAPES[model]
    separator = "" if model.startswith("1.5") else "_"
    content: Any = OmegaConf.load(Path("configs") / f"cogvideox{separator}{model}.yaml")
    for key in ("conditioner_config", "first_stage_config"):
        del content["model"][key]
    planned = folder / "planned.yaml"
    OmegaConf.save(content, planned)
    content["data"] = {
        "target": "bench.checks.encoded_samples.EncodedSamples",
        "params": {
            "num_samples": 8,
            "latent_shape": latents,
            "text_shape": text,
            "has_images": model.endswith("_i2v"),
        },
    }
    OmegaConf.save(content, folder / "model.yaml")
    files = [*(["configs/lora.yaml"] if mode == "lora" else []), "configs/sft.yaml"]
    given = f"""
        args.train_data=[none] args.load=null args.num_workers=0 args.warmup_steps=1 args.mode=pretrain
        args.train_iters={_NUM_STEPS} args.save_interval=null args.attention_backend=flash
    """.split()
    given.append(f"args.save={folder}")
    clips = [
        f"data.params.video_size=[{rows},{columns}]",
        f"data.params.max_num_frames={frames}",
        "args.latent_cache=none",  # nothing is encoded
    ]
    return (
        load_config([folder / "model.yaml", *files], given + words, allow_import=["bench"]),
        load_config([planned, *files], given + clips + words),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("mode", choices=("sft", "lora"))
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        configs = load(options.model, options.mode, options.words, Path(folder))
        print(json.dumps(measure(*configs)), flush=True)


def measure(config: Config, planned: Config) -> dict[str, Any]:
    """Run two steps; return the predicted peak and the real one, in GiB."""
    changed: Any = trainer  # the run neither checks files nor draws weights
    changed.check_train = lambda config: None
    changed.lora_cannot_learn = lambda transformer, groups: None
    without: Any = assembly
    without.initialize = lambda *args, **kwargs: None
    run = trainer.Trainer(config)
    setup = setup_of(planned, TrainArguments.from_config(planned), run.groups.world_size)
    plan = plan_memory(setup, None)
    peaks: list[int] = []
    after: Callable[[], None] = run.checkpointing.after_step

    def after_step() -> None:
        after()
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    run.checkpointing.after_step = after_step
    run.writer.save = lambda *args, **kwargs: None
    try:
        run.train()
    except RuntimeError as error:
        if len(peaks) < _NUM_STEPS:
            raise
        print(error)  # nothing was saved
    return row_of(plan, peaks[-1])


def row_of(plan: MemoryPlan, peak: int) -> dict[str, Any]:
    return {
        "policy": plan.setup.choice,
        "predicted": round(plan.step_peak / GIB, 2),
        "real": round(peak / GIB, 2),
        "error_percent": round(100 * (plan.step_peak / peak - 1), 1),
        "reserved": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


if __name__ == "__main__":
    main()
