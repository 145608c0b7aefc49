"""Compare the predicted memory of a training step on this CPU with the growth of the process.

    python -m bench.checks.plan_against_rss WIDTH LAYERS BATCH_SIZE {sft,lora} POLICY [--keep] [key=value ...]

The run of training_on_device.yaml, in float32, on latents [16, 3, 32, 48] (1,152 tokens and 32 of
text). Growth is that of the process's anonymous memory between the start, when all libraries are
loaded, and the peak of a step, sampled every 2 ms. --keep: freed memory stays with the process, as in a run that has
enough of it. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # recomputation loads it in the first step
import torch.nn.functional as F
from omegaconf import OmegaConf

from cogfast.config import Config, load_config
from cogfast.kernels.cpu.memory import return_freed_memory
from cogfast.schema.arguments import TrainArguments
from cogfast.train import trainer
from cogfast.train.plan.memory import plan_memory, setup_of

MIB = 2**20
_NUM_STEPS = 4
_FRAMES, _ROWS, _COLUMNS = 3, 32, 48  # of the latents


def load(options: argparse.Namespace, folder: Path) -> tuple[Config, Config]:
    """Return the configuration to run, whose data are latents, and the one to plan, with their clips."""
    content: Any = OmegaConf.load(Path(__file__).with_name("training_on_device.yaml"))
    network, clips = content.model.network_config.params, OmegaConf.load("configs/quickstart.yaml")
    network.hidden_size, network.num_layers = options.width, options.layers
    network.num_attention_heads = options.width // 64
    network.latent_height, network.latent_width = _ROWS, _COLUMNS
    content.data.params.latent_shape = [16, _FRAMES, _ROWS, _COLUMNS]
    content.deepspeed.train_micro_batch_size_per_gpu = options.batch_size
    content.deepspeed.gradient_accumulation_steps = 1
    content.deepspeed.bf16.enabled = False
    run, planned = folder / "run.yaml", folder / "planned.yaml"
    OmegaConf.save(content, run)
    content["data"] = clips["data"]
    OmegaConf.save(content, planned)
    files = ["configs/lora.yaml"] if options.mode == "lora" else []
    words = [
        f"args.activation_checkpointing={options.policy}",
        f"args.train_iters={_NUM_STEPS}",
        "args.save_interval=2",  # from then on the writer has its buffers
        f"args.save={folder}",
        "args.num_workers=0",
        *options.words,
    ]
    size = [
        f"data.params.video_size=[{8 * _ROWS},{8 * _COLUMNS}]",
        f"data.params.max_num_frames={4 * (_FRAMES - 1) + 1}",
        "args.latent_cache=none",  # nothing is encoded
    ]
    return (
        load_config([run, *files], words, allow_import=["bench"]),
        load_config([planned, *files], words + size),
    )


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon")


def measure(config: Config, planned: Config, keeps: bool) -> dict[str, Any]:
    """Run the steps; return prediction and growth in MiB."""
    changed: Any = trainer  # the run does not check files
    changed.check_train = lambda config: None
    x = torch.randn(1, 1, 64, 64, requires_grad=True)  # libraries start their threads
    F.scaled_dot_product_attention(x, x, x).sum().backward()
    gc.collect()
    before = anonymous_bytes()
    run = trainer.Trainer(config)
    if not keeps:
        return_freed_memory()
    setup = setup_of(planned, TrainArguments.from_config(planned), 1, device_type="cpu")
    plan = plan_memory(setup, None)
    peaks: list[int] = []
    highest, is_running = 0, True
    after: Callable[[], None] = run.checkpointing.after_step

    def sample() -> None:
        nonlocal highest
        while is_running:
            highest = max(highest, anonymous_bytes())
            time.sleep(0.002)

    def after_step() -> None:
        nonlocal highest
        after()
        peaks.append(highest)
        highest = 0

    run.checkpointing.after_step = after_step
    threading.Thread(target=sample, daemon=True).start()
    run.train()
    is_running = False
    growth = peaks[-1] - before
    return {
        "policy": plan.setup.choice,
        "trained_millions": round(setup.model.num_trained / 1e6, 1),
        "predicted": round(plan.step_peak / MIB),
        "real": round(growth / MIB),
        "error_percent": round(100 * (plan.step_peak / growth - 1), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("width", type=int)
    parser.add_argument("layers", type=int)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("mode", choices=("sft", "lora"))
    parser.add_argument("policy")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(*load(options, Path(folder)), options.keep)), flush=True)


if __name__ == "__main__":
    main()
