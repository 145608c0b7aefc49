"""Train a model of full size for a few steps and write what each step did to FOLDER/RANK.json.

    python -m tests.cuda.training_case {2b,5b,1.5_5b} {sft,lora} FOLDER [--streams] [key=value ...]

Kernels do not run, so that losses mean nothing. Latents and embeddings are those of
bench.checks.encoded_samples, weights are left as they lie, and nothing is saved.
"""

import argparse
import contextlib
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3
from omegaconf import OmegaConf

from cogfast.config import Config
from cogfast.extensions.plan.memory import GIB, plan_memory, setup_of
from cogfast.extensions.sparse import check as sparse_check
from cogfast.kernels import torch_library
from cogfast.train import assembly, phases, trainer
from cogfast.train.trainer import Trainer
from cogfast.train.watchers.nonfinite import NonfiniteCheck
from cogfast.train.watchers.watcher import Watchers
from tests.cuda.cases import CONDITIONED, LOG_INTERVAL, NUM_STEPS
from tests.cuda.null_device import ROOT, Counters
from tests.support.runs import run_of

# Frames, rows and columns of a clip, its latents [C, T, h, w], and its caption's embedding [L, E]
SHAPES = {
    "2b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "5b": ((49, 480, 720), [16, 13, 60, 90], [226, 4096]),
    "1.5_5b": ((81, 768, 1360), [16, 22, 96, 170], [224, 4096]),
}
SHAPES |= {f"{name}_i2v": SHAPES[name] for name in ("5b", "1.5_5b")}
# In the first step the device has 3% more than the plan, beside what the runtime takes for its context.
# PyTorch's allocator may have to unmap memory there, so that later steps have a larger one.
_RANGES = ("range ", "launches in ", "capture ")
_NUM_TIGHT, _CONTEXT_BYTES, _LARGE = 1, 600 << 20, 400_000_000_000


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
            "others": ["control_latents", "mask"] if CONDITIONED[0] in words else [],
        },
    }
    OmegaConf.save(content, folder / "model.yaml")
    files = [*(["configs/lora.yaml"] if mode == "lora" else []), "configs/sft.yaml"]
    given = [
        "args.train_data=[none]",
        "args.load=null",
        "args.num_workers=0",
        "args.warmup_steps=1",
        "args.mode=pretrain",
        "args.save_interval=null",
        "args.attention_backend=flash",
    ]
    clips = [
        f"data.params.video_size=[{rows},{columns}]",
        f"data.params.max_num_frames={frames}",
        "args.latent_cache=none",  # nothing is encoded
    ]
    return (
        run_of(folder / "model.yaml", *files).by(Trainer, "bench").config(*given, *words),
        run_of(planned, *files).config(*given, *clips, *words),
    )


class Observer:
    """Takes the counters of each step, and notes where the host waited."""

    def __init__(self) -> None:
        self.counters, self.waits, self.steps = Counters(), [], []
        self.counters.observe_syncs(self._note_sync)

    def _note_sync(self, name: bytes) -> None:
        self.waits.append(f"{name.decode()} in {_innermost_place()}")

    def end_step(self) -> None:
        counts = self.counters.take()
        self.steps.append(
            {
                "launches": counts.pop("launches", 0),
                "allocations": counts.get("cudaMalloc", 0) + counts.get("cuMemCreate", 0),
                "pinned_allocations": counts.get("cudaHostAlloc", 0)
                + counts.get("cudaHostRegister", 0),
                "waits": self.waits,
                "faults": [n for n in counts if n.startswith("fault ")],
                "kernels": {
                    name.removeprefix("launch "): number
                    for name, number in counts.items()
                    if name.startswith("launch ")
                },
                "ranges": {name: n for name, n in counts.items() if name.startswith(_RANGES)},
                "peak": torch.cuda.max_memory_allocated(),
            }
        )
        self.waits = []
        torch.cuda.reset_peak_memory_stats()


def _innermost_place() -> str:
    """Name the innermost function of this thread that is neither PyTorch's nor ours."""
    ours = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        if "/torch/" in name or name.startswith((ours, "<")) or "/ctypes/" in name:
            continue
        # The packages' folder may lie in the project's.
        is_package = "/site-packages/" in name or not name.startswith(str(ROOT))
        path = "/".join(Path(name).parts[-3:] if is_package else Path(name).relative_to(ROOT).parts)
        return f"{path}:{frame.name}"
    return "a backward pass"


def prepare(config: Config) -> trainer.Trainer:
    """Return a trainer that neither checks files, draws weights nor saves."""
    changed: Any = phases
    changed.check_train = lambda config: None
    changed.lora_cannot_learn = lambda transformer, groups: None
    results: Any = sparse_check
    results.sparse_error = lambda *args: None  # kernels do not run
    without: Any = assembly
    without.initialize = lambda *args, **kwargs: None
    # It compares what collectives brought, which move nothing here.
    order: Any = partitioned_param_coordinator
    order.assert_ints_same_as_other_ranks = lambda ints: None
    run = trainer.Trainer(config)
    run.writer.save = lambda *args, **kwargs: None
    # Memory that no kernel has written may hold NaN, at which DeepSpeed would skip a step.
    is_invalid: Any = deepspeed_utils.is_invalid_grad_norm
    for module in (deepspeed_utils, stage3):
        changed = module
        changed.is_invalid_grad_norm = lambda norm: is_invalid(norm) and False  # with its wait
    check: Any = NonfiniteCheck
    check.after_log = lambda *args: None
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("mode", choices=("sft", "lora"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--card", type=float, default=1.03, help="its memory, by the plan's")
    parser.add_argument("--streams", action="store_true", help="check the use of side streams")
    parser.add_argument("words", nargs="*")
    options = parser.parse_intermixed_args()
    words = [f"args.train_iters={NUM_STEPS}", f"args.log_interval={LOG_INTERVAL}"]
    words += [f"args.save={options.out}", *options.words]
    check = None
    if options.streams:
        from tests.cuda.stream_check import StreamCheck

        check = StreamCheck()
    with tempfile.TemporaryDirectory() as folder:
        config, planned = load(options.model, options.mode, words, Path(folder))
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        setup = setup_of(planned.run, num_ranks)
        predicted = plan_memory(setup, None).step_peak
        if setup.args.activation_checkpointing != "auto":  # which takes what there is
            os.environ["NULLCUDA_BYTES"] = str(int(predicted * options.card) + _CONTEXT_BYTES)
        run, observer = prepare(config), Observer()
        watchers: Any = Watchers
        after_step = watchers.after_step

        def end(self: Watchers, step: int) -> None:
            after_step(self, step)
            observer.end_step()
            if step == _NUM_TIGHT and setup.args.activation_checkpointing != "auto":
                os.environ["NULLCUDA_BYTES"] = str(_LARGE)
                # Unmapped parts of a segment are mapped again one by one, for which each later step allocates.
                torch.cuda.empty_cache()

        watchers.after_step = end
        try:
            with check or contextlib.nullcontext():
                run.train()
        except RuntimeError:  # at the end: nothing was saved
            if len(observer.steps) < NUM_STEPS:
                raise
    report = {
        "left": torch_library.LEFT_MULTIPROCESSORS,
        "steps": observer.steps,
        "predicted_gib": predicted / GIB,
        "peak_gib": max(step["peak"] for step in observer.steps[2:]) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        # Before 2.13 PyTorch's operations on lists of tensors launch more kernels.
        "has_short_lists": [int(x) for x in torch.__version__.split(".")[:2]] < [2, 13],
    }
    if check is not None:
        report |= {"stream_problems": sorted(check.problems), "stream_uses": check.num_uses}
    (options.out / f"{run.groups.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
