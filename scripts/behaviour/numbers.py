"""The part "numbers": losses of training, sums of weights and frames, plans, steps on the null CUDA runtime.

On the processor and PyTorch that wrote the fixtures all numbers must be equal bit for bit; elsewhere they
have a relative tolerance. Texts of plans and counts of the null runtime are always equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from scripts.behaviour import null_cuda
from scripts.behaviour.difference import Difference, compare_values, machine, normalized
from scripts.behaviour.forks import Command, Ended, run
from scripts.behaviour.inputs import unpack
from scripts.behaviour.number_cases import plan_cases, training_cases

PART = "numbers"
_PRELOAD = ("cogfast.train.trainer", "deepspeed.ops", "torch.utils.tensorboard", "transformers")
# These numbers of a line of metrics.jsonl depend on time and on the machine.
_OF_MACHINE = (
    "_ms",
    "_per_s",
    "_seconds",
    "mfu",
    "model_tflops",
    "memory_",
    "communication",
    "step",
)
_SMALL = ("family 5b", "lora")  # of --small
# On other processors, relative. With other instructions than the pinned ones, which is more than another
# processor changes, losses of float32 moved by at most 7e-7, norms and losses of single timesteps by 1.4e-6,
# losses in bf16 by 3e-5 and norms by 1e-3: a product of bf16 rounds at 2^-9, and another order of its sums
# makes it round the other way. The codes of 8-bit moments change where a value lies between two of them.
_TOLERANCE, _BF16, _NOTHING = (
    1e-6,
    2e-3,
    1e-9,
)  # the last is absolute: the rounding of a loss of zero
_OF_FEW = 1e-5  # norms, and losses of few samples
_WEIGHTS = 1e-5  # sums: Adam makes a step of its own of the rounding of a gradient near zero
_PIXELS = 1e-3  # means of 8-bit frames, after x264


def record(folder: Path, work: Path) -> None:
    """Write runs.json, plans.json and, with a CUDA build, null_cuda.json."""
    found = _training(work, training_cases())
    content = {"machine": machine(), "cases": found}
    _write(folder / "runs.json", content)
    _write(folder / "plans.json", _plans(work, plan_cases()))
    steps = null_cuda.steps(work)
    if steps is None:
        print("null_cuda.json is not recorded: no .venv-cuda")
    else:
        _write(folder / "null_cuda.json", steps)


def compare(folder: Path, work: Path, small: bool) -> tuple[int, list[Difference]]:
    """Compare the numbers of this tree with the recorded ones."""
    recorded = json.loads((folder / "runs.json").read_text())
    is_same = recorded["machine"] == machine()
    rule = "equal bit for bit" if is_same else "within a relative tolerance, on another processor"
    print(f"{PART}: numbers must be {rule}", flush=True)
    cases = training_cases()
    if small:
        cases = {name: cases[name] for name in _SMALL}
        recorded["cases"] = {name: recorded["cases"].get(name) for name in _SMALL}
    found = _training(work, cases)
    differences = []
    for name in sorted(recorded["cases"].keys() | found.keys()):
        pair = recorded["cases"].get(name, {}), found.get(name, {})
        differences += _compare_case(name, *pair, 0.0 if is_same else _tolerance(name))
    count = len(found)
    if not small:
        plans = _plans(work, plan_cases())
        differences += _compare_cases(json.loads((folder / "plans.json").read_text()), plans)
        steps = null_cuda.steps(work)
        count += len(plans)
        if steps is None:
            print(f"{PART}: launches, waits and peaks are not compared: no .venv-cuda", flush=True)
        else:
            recorded_steps = json.loads((folder / "null_cuda.json").read_text())
            differences += _compare_cases(recorded_steps, steps)
            count += len(steps)
    return count, differences


def _compare_cases(recorded: dict, found: dict) -> Iterator[Difference]:
    for name in sorted(recorded.keys() | found.keys()):
        yield from compare_values(PART, name, recorded.get(name, {}), found.get(name, {}))


def _compare_case(name: str, recorded: object, found: object, tolerance: float, what: str = ""):
    """Yield the differences of two values; numbers of several steps count once, at the first."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            if tolerance and key == "digest":
                continue
            if key == "signed" and {key, "sum"} <= recorded.keys() & found.keys():
                # Recorded on another processor than the rest: never bit for bit.
                rest = abs(recorded[key] - found[key]) / max(recorded["sum"], _NOTHING)
                if rest <= max(tolerance, _WEIGHTS):
                    continue
            limit = tolerance
            if tolerance and (key == "grad_norm" or "_band_" in key):
                limit = max(tolerance, _OF_FEW)
            if tolerance and key in ("weights", "ema"):
                limit = max(tolerance, _WEIGHTS)
            if tolerance and key == "frames":
                limit = max(tolerance, _PIXELS)
            pair = recorded.get(key, "(nothing)"), found.get(key, "(nothing)")
            yield from _compare_case(name, *pair, limit, f"{what}.{key}" if what else key)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, pair in enumerate(zip(recorded, found, strict=True)):
            steps = list(_compare_case(name, *pair, tolerance, f"{what}[{i}]"))
            yield from steps[:1]
            if steps:
                return
    elif not _are_equal(recorded, found, tolerance):
        yield from compare_values(PART, name, recorded, found, what)


def _are_equal(recorded: object, found: object, tolerance: float) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        nothing = _NOTHING if tolerance else 0.0
        return math.isclose(recorded, found, rel_tol=tolerance, abs_tol=nothing)
    return type(recorded) is type(found) and recorded == found


def _tolerance(name: str) -> float:
    return _BF16 if "bf16" in name else _TOLERANCE


def _training(work: Path, cases: dict[str, list[Command]]) -> dict[str, dict]:
    folder = work / "runs"
    ended = run(cases, folder, unpack(work / "given"), preload=_PRELOAD)
    found = {name: _numbers(folder / name, ended[name], work) for name in cases}
    shutil.rmtree(work / "given")
    shutil.rmtree(folder)
    return found


def _numbers(folder: Path, ended: list[Ended], work: Path) -> dict:
    if not all(one.is_success for one in ended):
        line = (ended[-1].outputs[0].strip().splitlines() or [""])[-1]
        return {
            "statuses": [one.statuses for one in ended],
            "text of the error": normalized(line, work),
        }
    found: dict = {}
    for run_folder in sorted(path.parent for path in folder.glob("*/metrics.jsonl")):
        of_run = _metrics(run_folder / "metrics.jsonl")
        for kind, name in (("weights", "transformer"), ("ema", "transformer_ema")):
            files = sorted(run_folder.glob(f"checkpoints/*/{name}/*.safetensors"))
            if files:
                of_run[kind] = _tensor_sums(files)
        if files := sorted(run_folder.glob("checkpoints/*/pytorch_lora_weights.safetensors")):
            of_run["weights"] = _tensor_sums(files)
        if files := sorted(run_folder.glob("samples/*/*.mp4")):
            of_run["frames"] = _frame_sums(files)
        found[run_folder.name] = of_run
    for out in sorted(path.parent for path in folder.glob("*/prompts.json")):
        found[out.name] = {"frames": _frame_sums(sorted(out.glob("*.mp4")))}
        if files := sorted(out.glob("*.safetensors")) + sorted(out.glob("*.pt")):
            found[out.name] = {"weights": _tensor_sums(files)}
    return found


def _metrics(file: Path) -> dict[str, list]:
    """Return the numbers of metrics.jsonl that a run computes, a list for each name."""
    found: dict[str, list] = {}
    for text in file.read_text().splitlines():
        for name, value in json.loads(text).items():
            is_of_machine = any(word in name for word in _OF_MACHINE)
            if isinstance(value, float | int) and not is_of_machine:
                found.setdefault(name, []).append(value)
    return found


def _tensor_sums(files: list[Path]) -> dict[str, object]:
    """Return sums over all tensors in float64: of absolute values, and of products with a drawn sign of each
    name, which another name, order or sign of values changes; and digests of names and shapes, and of bytes."""
    digest, layout = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    total, signed, count = 0.0, 0.0, 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                about = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                layout.update(about)
                digest.update(about + raw)
                values = tensor.double().flatten()
                seed = int.from_bytes(hashlib.blake2b(about, digest_size=4).digest())
                signs = np.random.Generator(np.random.PCG64(seed)).uniform(-1, 1, len(values))
                signed += (values @ torch.from_numpy(signs)).item()
                total += values.abs().sum().item()
                count += 1
    return {
        "tensors": count,
        "sum": total,
        "signed": signed,
        "layout": layout.hexdigest(),
        "digest": digest.hexdigest(),
    }


def _frame_sums(files: list[Path]) -> dict[str, object]:
    """Return number and mean of the frames of videos, and a digest of their pixels."""
    import av

    digest, total, count = hashlib.blake2b(digest_size=16), 0.0, 0
    for file in files:
        with av.open(str(file)) as container:
            for frame in container.decode(video=0):
                pixels = frame.to_ndarray(format="gray")
                digest.update(f"{pixels.shape}".encode() + pixels.tobytes())
                total += float(pixels.mean(dtype=np.float64))
                count += 1
    return {"count": count, "mean": total / max(1, count), "digest": digest.hexdigest()}


def _plans(work: Path, cases: dict[str, list[Command]]) -> dict[str, dict]:
    """Return status and text of each plan. Its seconds are predictions, and stay in the text."""
    empty = work / "empty"
    empty.mkdir()
    ended = run(cases, work / "plans", empty, preload=_PRELOAD)
    found = {}
    for name in cases:
        (one,) = ended[name]
        lines = one.outputs[0].replace(str(Path(__file__).resolve().parents[2]), "<cogfast>")
        found[name] = {"statuses": one.statuses, "text": lines.splitlines()}
    return found


def _write(file: Path, content: dict) -> None:
    """Write JSON with a list of numbers in one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_lines(content, "") + "\n")


def _lines(value: object, indent: str) -> str:
    if not isinstance(value, dict) or not value:
        is_text = isinstance(value, list) and any(isinstance(item, str) for item in value)
        return json.dumps(value, indent=len(indent) + 1 if is_text else None)
    inner = (
        f"{indent} {json.dumps(key)}: {_lines(value[key], indent + ' ')}" for key in sorted(value)
    )
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
