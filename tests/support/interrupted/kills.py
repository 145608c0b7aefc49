"""Runs under torchrun that are killed: all processes, one rank, or torchrun itself."""

import json
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from cogfast.core.addresses import is_url
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint, step_of
from tests.support.tiny_run import Started, losses, run, start, wait_for

SECONDS_TO_END = 30
# Below a `save` folder, in the layout of cogfast and in that of CogVideo's diffusers trainer
LATEST = ("*/checkpoints/latest", "*/latest")
UNFINISHED = ("*/checkpoints/*.incomplete", "*/checkpoint-*.incomplete")
START_SECONDS = 6.0  # of a launch: imports, groups, model, checkpoint


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of `what` ("all", "rank 0", "rank 1", "torchrun"), `delay` seconds after `when`: the
    "start" of the launch, or, once checkpoint `step` is there, that "step" or the next "save"."""

    what: str
    when: str
    step: int = 0
    delay: float = 0.0


def draw_kills(seed: int, count: int, last_step: int) -> list[Kill]:
    """Draw kills from a seed: their steps are spread over the run, every second is in a save, every
    sixth at a start."""
    rng = random.Random(seed)
    longest = {"start": START_SECONDS, "step": 0.2, "save": 0.04}
    kills = []
    for i, step in enumerate(sorted(rng.sample(range(1, last_step), count))):
        when = "save" if i % 2 else ("start", "step", "step")[i // 2 % 3]
        what = rng.choice(("all", "rank 0", "rank 1", "torchrun"))
        kills.append(Kill(what, when, step, rng.uniform(0, longest[when])))
    return kills


def newest_step(save: Path) -> int:
    """Return the newest step of the runs below `save`; 0 if none has a checkpoint yet."""
    latest = (name.read_text() for pattern in LATEST for name in save.glob(pattern))
    return max((int(name.removeprefix("checkpoint-")) for name in latest), default=0)


def has_unfinished(save: Path) -> bool:
    return any(path for pattern in UNFINISHED for path in save.glob(pattern))


def run_with_kills(
    arguments: Sequence[str],
    save: Path,
    kills: Sequence[Kill],
    resume: Sequence[str] = ("--resume", "auto"),
) -> list[bool]:
    """`cogfast WORDS` of two processes, again after each kill, and at last to its end. Returns
    whether each kill left an unfinished checkpoint."""
    was_in_save = []
    for kill in kills:
        before = newest_step(save)
        # The rank of a process is read from the environment of a fresh start.
        is_fresh = kill.when == "start" or kill.what.startswith("rank")
        process = start([*arguments, *resume], 2, is_fresh)
        if kill.when != "start":
            wanted = max(kill.step, before + 1)
            wait_for(lambda: newest_step(save) >= wanted, process, timeout=600)  # noqa: B023
        kill_now(process, kill, save)
        was_in_save.append(has_unfinished(save))
    done = run([*arguments, *resume], 2, timeout=1200)
    assert done.returncode == 0, done.stdout
    return was_in_save


def kill_now(process: Started, kill: Kill, save: Path) -> str:
    """Kill; the remaining processes must end by themselves. Returns the output."""
    launcher = psutil.Process(process.pid)
    if kill.when == "start":
        time.sleep(kill.delay)
    everything = [*launcher.children(recursive=True), launcher]
    ranks = {f"rank {p.environ().get('RANK')}": p for p in launcher.children()}
    if kill.when == "save":
        wait_for(lambda: has_unfinished(save), process, pause=0.0)
    if kill.when != "start":
        time.sleep(kill.delay)
    assert process.poll() is None, f"the run was over before {kill}: {process.communicate()[0]}"
    rank = ranks.get(kill.what, launcher)  # where torchrun has not started it: torchrun
    for target in {"all": everything, "torchrun": [launcher]}.get(kill.what, [rank]):
        with suppress(psutil.NoSuchProcess):  # it may end by itself, or with another one
            target.kill()
    _, alive = psutil.wait_procs([p for p in everything if p != launcher], timeout=SECONDS_TO_END)
    assert not alive, f"{kill}, and {alive} stayed"
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode != 0, output
    return output


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Below two `save` folders: weights, moments, EMA and counters at the last step, and losses, bit
    for bit. Runs that were killed before their first checkpoint count for nothing."""
    runs = [[p for p in save.iterdir() if newest_checkpoint(p)] for save in (one, other)]
    (first,), (second,) = runs
    checkpoints = [newest_checkpoint(run) for run in (first, second)]
    assert [step_of(path) for path in checkpoints] == [step, step]
    texts = [(path / "manifest.json").read_text() for path in checkpoints]
    files = zip(*(json.loads(text)["bytes"] for text in texts), strict=True)
    # In a store, each save has names of its own.
    about = [json.loads(re.sub(r"(rank-\d{5})-[0-9a-f]{8}", r"\1", text)) for text in texts]
    for manifest, run_of in zip(about, (one, other), strict=True):
        args = manifest["config"]["args"]
        save = args.pop("save", None)
        folders = (save, str(Path(args.pop("run_folder") or "/").parent))
        assert str(run_of) in folders or is_url(save)  # run_of: a copy of what is in the store
        args.pop("resume", None)
        args.pop("latent_cache", None)
        manifest.pop("checksum")  # of the manifest, with its paths
    assert about[0] == about[1]
    for names in files:
        found, wanted = map(load_file, map(Path.joinpath, checkpoints, names))
        assert found.keys() == wanted.keys()
        kinds = {key.partition("/")[0] for key in wanted}
        assert kinds >= {"master", "exp_avg", "exp_avg_sq", "shadow"}
        for key, value in wanted.items():
            assert torch.equal(found[key], value), f"{names[0]}: {key}"
    assert losses(first) == losses(second)
