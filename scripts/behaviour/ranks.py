"""The part "ranks": one of two ranks fails in each phase of a run, and how both end.

For each case: whether both ended by themselves, their exit statuses, and the last line of each.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from scripts.behaviour.difference import ERROR_TEXT, Difference, normalized
from scripts.behaviour.forks import Command, Ended, run
from scripts.behaviour.inputs import unpack

PART = "ranks"
_PRELOAD = ("cogfast.train.trainer", "deepspeed.ops", "torch.utils.tensorboard", "transformers")
_REPEATS = 3  # of a recording: which of several errors a rank sees may depend on time
_SMALL = 2
_SLOTS = 4  # ranks at the same time: most of them wait for the other one
_HERE = "scripts.behaviour.planted"
_WORDS = [
    "--base",
    "inputs/5b.yaml",
    "--allow-import",
    "scripts",
    f"data.target={_HERE}.Clips",
    f"model.first_stage_config.target={_HERE}.Wavelet",
    f"model.conditioner_config.params.emb_models.0.target={_HERE}.Text",
    f"model.network_config.target={_HERE}.Network",
    "args.train_data=[inputs/pairs/rows.jsonl]",
    "args.num_workers=0",
    "deepspeed.train_micro_batch_size_per_gpu=1",
]
_TRAIN = [
    *_WORDS,
    "args.valid_data=[inputs/pairs/rows.jsonl]",
    "args.eval_interval=2",
    "args.eval_iters=1",
    "args.eval_num_samples=2",
    "args.eval_sampling_steps=1",
    "args.train_iters=3",
    "args.save_interval=2",
    "args.log_interval=1",
    "args.run_folder=run",
    "deepspeed.optimizer.type=AdamW",
]
_ON_RANK_0 = ("opening data", "building the engine", "losses", "full disk", "SIGTERM", "exit")
_ON_RANK_0 += ("decoding a sample", "no space at a sync")
_FUSED = "deepspeed.optimizer.type=sat.ops.FusedEmaAdam"
_OWN_NETWORK = "model.network_config.target=dit_video_concat.DiffusionTransformer"


def record(folder: Path, work: Path) -> None:
    """Write cases.json: the ends that occurred in each case, in some repeats."""
    found: dict[str, list] = {}
    for repeat in range(_REPEATS):
        for name, end in _ends(work / str(repeat), None).items():
            ends = found.setdefault(name, [])
            if end not in ends:
                ends.append(end)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, sort_keys=True)
    (folder / "cases.json").write_text(text + "\n")


def compare(folder: Path, work: Path, small: bool) -> tuple[int, list[Difference]]:
    """Compare how the ranks end with how they did."""
    recorded = json.loads((folder / "cases.json").read_text())
    found = _ends(work, _SMALL if small else None)
    differences = []
    for name in sorted(found if small else recorded.keys() | found.keys()):
        differences += _compare(name, recorded.get(name, []), found.get(name))
    return len(found), differences


def _compare(name: str, ends: list[dict], found: dict | None) -> list[Difference]:
    if found in ends:
        return []
    if not ends or found is None:
        texts = [json.dumps(value) if value else "(nothing)" for value in (ends, found)]
        return [Difference(PART, name, "case", *texts)]
    # The end that differs least
    wrong = min(([key for key in end if end[key] != found[key]] for end in ends), key=len)
    return [
        Difference(
            PART,
            name,
            ERROR_TEXT if str(found[key]).startswith("cogfast: ") else key,
            " or ".join(sorted({json.dumps(end[key]) for end in ends})),
            json.dumps(found[key]),
        )
        for key in wrong
    ]


def _ends(work: Path, most: int | None) -> dict[str, dict]:
    names = list(_cases())[:most]
    jobs = {str(i): _cases()[name] for i, name in enumerate(names)}
    given = unpack(work / "given")
    _write_node(given / "node", given)
    ended = run(jobs, work / "runs", given, preload=_PRELOAD, slots=_SLOTS)
    found = {name: _end(ended[str(i)], work / "runs" / str(i)) for i, name in enumerate(names)}
    shutil.rmtree(work / "runs")
    return found


def _write_node(node: Path, inputs: Path) -> None:
    """Write the disk of a second node, with inputs of its own and the same folder of the run."""
    node.mkdir()
    shutil.copytree(inputs, node / "inputs", ignore=shutil.ignore_patterns("node"))
    (node / "run").symlink_to("../../run", target_is_directory=True)


def _end(ended: list[Ended], folder: Path) -> dict:
    last = ended[-1]
    return {
        "commands": len(ended),
        "end": "had to be killed" if None in last.statuses else "by themselves",
        "statuses": last.statuses,
        **{f"last line of rank {i}": _last_line(o, folder) for i, o in enumerate(last.outputs)},
    }


# The main thread of a rank and the one that watches its connections both notice that another rank is gone,
# and gloo's text depends on which side closes first: which of these lines is the last depends on time.
_OTHER = re.compile(
    r"cogfast: (rank \d ends: another rank failed; see its own output for the cause|"
    r"(rank \d: )?another rank failed; see its own output for the cause \(.*\))"
)


def _last_line(output: str, folder: Path) -> str:
    """Return the last line with what depends on time and machine replaced."""
    lines = [line for line in output.splitlines() if line.strip()]
    line = normalized(lines[-1] if lines else "", folder)
    # Threads write the entries of a cache: which one fails first depends on time.
    line = re.sub(r"\b[0-9a-f]{2}/[0-9a-f]{32}\.safetensors", "<entry>.safetensors", line)
    line = _OTHER.sub("<another rank failed>", line)
    line = re.sub(r"\[?127\.0\.0\.1\]?:\d+", "<address>", line)
    line = re.sub(r"/\S*/([\w.]+\.(?:cc|cpp|h)):\d+", r"\1", line)
    line = re.sub(r"\d+ ?ms/step.*|\d+(\.\d+)? s\b", "<times>", line)
    return line


def _train(
    fault: str, *words: str, rank: int = 1, node: str = "", own: dict[str, str] | None = None
) -> Command:
    variables = {"FAULT": fault, **(own or {})} | ({"NODE": node} if node else {})
    return Command(["train", *_TRAIN, *words], 2, _HERE, own={str(rank): variables})


def _cases() -> dict[str, list[Command]]:
    """Return the commands of each case, of which the last one fails on a rank."""
    faults = {
        "start": "main:1:",
        "start of processes": "start processes:1:",
        "opening data": "open data:1:",
        "opening held-out data": "open data:2:",
        "building the first stage": "build first stage:1:",
        "building the model": "build model:1:",
        "before the trainer": "build trainer:1:",
        "building the engine": "build engine:1:",
        "behind the trainer": "trainer is built:1:",
        "reading the first sample": "read:1:",
        "first encoding": "encode:1:",
        "forward": "forward:1:",
        "losses": "losses:1:",
        "out of memory": "losses:2:out of memory",
        "backward": "backward:1:",
        "step": "step:1:",
        "held-out loss": "forward without gradients:1:",
        "out of memory in an evaluation": "forward without gradients:2:out of memory",
        "decoding a sample": "decode:1:",
        "full disk": "losses:2:full disk",
        "no space at a sync": "sync:2:no space",
        "exit": "losses:2:exit",
    }
    for number in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL"):
        faults[number] = f"losses:2:{number}"
    longer = "args.train_iters=6"  # ranks agree on a stop in a later step
    faults["SIGTERM at the start"] = "build model:1:SIGTERM"
    cases = {
        f"{name}, rank 1": [_train(fault, *([longer] if name.startswith("SIG") else []))]
        for name, fault in faults.items()
    }
    for name in _ON_RANK_0:
        cases[f"{name}, rank 0"] = [_train(faults[name], longer, rank=0)]
    cases["trackers, rank 0"] = [_train("trackers:1:", rank=0)]
    layouts = {
        "zero 3": ("args.zero_stage=3",),
        "tp 2": ("args.model_parallel_size=2", _OWN_NETWORK),
        "cp 2": ("args.context_parallel_size=2", _OWN_NETWORK),
    }
    for layout, words in layouts.items():
        cases[f"losses, {layout}"] = [_train(faults["losses"], *words)]
    for name in ("full disk", "decoding a sample"):
        cases[f"{name}, zero 3"] = [_train(faults[name], *layouts["zero 3"])]
    cases["losses, fused"] = [_train(faults["losses"], _FUSED)]
    return _files() | cases | _other_commands()  # ranks that wait for long first


def _files() -> dict[str, list[Command]]:
    """Return the cases in which files of the second rank's node are damaged or missing."""
    lora = ["args.lora_rank=4", "args.load=inputs/weights/5b", _OWN_NETWORK, _FUSED]
    stopped = [*_TRAIN, "args.train_iters=2"]
    first = Command(["train", *stopped], 2, _HERE)
    resumed = lambda damage, **named: [
        first,
        _train("", "--resume", "run", own={"DAMAGE": damage}, **named),
    ]
    damaged = {
        "configuration that cannot be read": ("cut inputs/5b.yaml",),
        "another configuration": ("seed inputs/5b.yaml",),
        "no configuration": ("remove inputs/5b.yaml",),
        "no data": ("remove inputs/pairs/rows.jsonl",),
        "a missing clip": ("remove inputs/clips/videos/2.mp4",),
        "a damaged clip": ("cut inputs/clips/videos/2.mp4",),
        "no first stage": ("remove inputs/clips/wavelet.safetensors",),
        "damaged weights": ("cut inputs/weights/5b/diffusion_pytorch_model.safetensors", *lora),
        "missing weights": ("remove inputs/weights/5b/diffusion_pytorch_model.safetensors", *lora),
    }
    node = "inputs/node"
    cases = {
        f"{name} on one node": [_train("", *words, node=node, own={"DAMAGE": damage})]
        for name, (damage, *words) in damaged.items()
    }
    damage = "remove inputs/5b.yaml"
    cases["no configuration, rank 0"] = [_train("", node=node, own={"DAMAGE": damage}, rank=0)]
    cases["intact node"] = [_train("", node=node)]
    part = "run/checkpoints/00000002/rank-00001.safetensors"
    cases["resume of a damaged file"] = resumed(f"cut {part}")
    cases["resume without a file"] = resumed(f"remove {part}")
    cases["resume without a manifest"] = resumed("remove run/checkpoints/00000002/manifest.json")
    cases["resume on a node without the run"] = resumed("remove run", node=node)
    return cases


def _other_commands() -> dict[str, list[Command]]:
    cache = ["cache", *_WORDS, "args.latent_cache=cache"]
    sample = ["sample", "--base", "inputs/5b.yaml", *_WORDS[2:-2], "args.force_inference=true"]
    sample += ["--prompt", "one", "--prompt", "two", "--out", "out", "--steps", "2"]
    sample[sample.index("args.train_data=[inputs/pairs/rows.jsonl]")] = "args.seed=1"
    return {
        f"{words[0]}: {fault}": [Command(words, 2, _HERE, own={"1": {"FAULT": fault}})]
        for words, found in (
            (
                cache,
                ("encode:1:", "encode:1:small disk", "encode:1:SIGTERM", "text:1:out of memory"),
            ),
            (sample, ("forward without gradients:1:", "decode:1:", "decode:1:SIGTERM", "text:1:")),
        )
        for fault in found
    }
