"""args.elastic: which ranks of a launch train, so that a run keeps its global batch with fewer of them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cogfast.core.addresses import url_of
from cogfast.core.files import write_text
from cogfast.core.keys import with_origins
from cogfast.core.values import KeyProblem, counted, select
from cogfast.distributed.process_groups import OtherRankError
from cogfast.extensions.elastic.keys import ElasticKeys
from cogfast.extensions.elastic.ranks import Ranks
from cogfast.extensions.stores.store import StoreError
from cogfast.model.weights.checkpoint_manifest import (
    RESUMABLE,
    DamagedRun,
    is_in_run,
    read_manifest,
)
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.mesh import divide
from cogfast.train.run.folder import adapters_to_resume, checkpoint_to_resume

logger = logging.getLogger(__name__)

_KEY = ElasticKeys.key("elastic")
_DIVISION = "dp %s x batch %s x accumulation %s"
_BETWEEN_LINES = 60.0  # seconds, while ranks wait


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision of rank 0 for all. num_ranks: the ranks that train; 0 if all wait. text: the log line."""

    resume: str  # args.resume
    text: str
    num_ranks: int = 0
    batch_size: int = 1
    accumulation: int = 1


def follow_world(
    args: TrainKeys, deepspeed: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], str, Ranks]:
    """Return {key: value} of args for the ranks of this launch, the key that decides them, and the launch.

    Ranks that idle do not return, and none while the run waits for more ranks. deepspeed: the section.
    """
    mode = args.elastic
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        text = f"{_KEY}={mode} needs torchrun, with --nnodes=MIN:MAX and --max-restarts=N (docs/launch.md)"
        raise KeyProblem(_KEY, f"{text}; start it so, or use {_KEY}=off")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It keeps the addresses of earlier starts, with which ranks then try to connect.
        text = f"{_KEY}={mode} needs a new store at each start, and this torchrun keeps its own"
        raise KeyProblem(_KEY, f"{text}; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun")
    launch = Ranks.join()
    plan = _agree(partial(plan_world, args, deepspeed), origins, launch)
    while True:
        if plan.text and launch.rank == 0:
            logger.warning("%s", plan.text)
        if plan.num_ranks:
            break
        # Until torchrun ends this rank, because another machine has come
        time.sleep(_BETWEEN_LINES)
    if launch.rank >= plan.num_ranks:
        if launch.idle():
            raise SystemExit(0)
        raise OtherRankError("rank 0 has ended or stopped, and its run was not over")
    os.environ["WORLD_SIZE"] = str(plan.num_ranks)
    values: dict[str, Any] = {
        "batch_size": plan.batch_size,
        "gradient_accumulation_steps": plan.accumulation,
    }
    values |= {"resume": plan.resume}
    return {args.key(key): value for key, value in values.items()}, _KEY, launch


def _agree(plan_for: Callable[[int], Plan], origins: Mapping[str, str], launch: Ranks) -> Plan:
    """Return rank 0's plan, which it makes of what it finds on its disk."""
    if launch.rank == 0:
        try:
            with with_origins(origins):
                plan = plan_for(launch.num_ranks)
        except Exception as error:
            launch.store.set("plan", json.dumps({"error": str(error)}))
            raise
        launch.store.set("plan", json.dumps(asdict(plan)))
        return plan
    answer = json.loads(launch.store.get("plan"))
    if "error" in answer:
        raise OtherRankError(f"rank 0 failed: {answer['error']}")
    return Plan(**answer)


def plan_world(args: TrainKeys, deepspeed: Mapping[str, Any], num_ranks: int) -> Plan:
    """Plan a run on `num_ranks` ranks, from the checkpoint that it resumes from."""
    resume, manifest = _resume(args), dict[str, Any]()
    try:
        checkpoint = checkpoint_to_resume(args.changed(resume=resume))
        if checkpoint is not None and adapters_to_resume(checkpoint) is None:
            manifest = read_manifest(checkpoint, RESUMABLE)
    except StoreError as error:
        key = args.key("save" if args.run_folder is None else "run_folder")
        raise KeyProblem(key, f"{key}={error}") from None
    except DamagedRun as error:
        fall_back(error, resume)
        return plan_world(args, deepspeed, num_ranks)
    tensor, context = args.model_parallel_size, args.context_parallel_size
    of_model, num_before = tensor * context, num_ranks
    before = (num_before // of_model, args.batch_size, args.gradient_accumulation_steps)
    if manifest:
        num_before = len(manifest["slices"])  # a file for each rank
        sizes = ("model_parallel_size", "context_parallel_size", "batch_size")
        keys = (*sizes, "gradient_accumulation_steps")
        tp, cp, *each = (select(manifest, f"config.args.{key}") or 1 for key in keys)
        before = (num_before // (tp * cp), *each)
    total = deepspeed.get("train_batch_size") or manifest.get("global_batch")
    total = total or args.batch_size * args.gradient_accumulation_steps * max(1, before[0])
    if args.elastic == "shrink" and num_ranks < of_model:
        text = f"{_KEY}=shrink: {counted(num_ranks, 'rank is', 'ranks are')} left, but {of_model} share a model"
        text += f" (args.model_parallel_size={tensor} x args.context_parallel_size={context}); raise MIN of "
        raise KeyProblem(_KEY, f"{text}torchrun's --nnodes=MIN:MAX, or use {_KEY}=wait")
    here = divide(total, args.batch_size, num_ranks // of_model)
    used, wanted = here[0] * of_model, max(num_before, of_model)
    if args.elastic == "wait" and used < wanted:
        text = f"{_KEY}=wait: {counted(num_ranks, 'rank is', 'ranks are')} here, {used} of which divide the "
        number = f"as many as before ({wanted})" if manifest else wanted
        text += f"global batch {total}; waiting until {number} can train: start more "
        return Plan(resume, f"{text}torchruns, or use {_KEY}=shrink")
    text = f"{_KEY}={args.elastic}: {counted(used, 'rank trains', 'ranks train')}"
    text += f", {num_before} before" if manifest else ""
    text += f"; global batch {total} = {_DIVISION % here}"
    text += f" (before: {_DIVISION % before})" if manifest else ""
    if here[1] != args.batch_size:
        text += f", since args.batch_size={args.batch_size} does not divide {total // here[0]}"
    if used < num_ranks:
        text += f"; {counted(num_ranks - used, 'rank idles', 'ranks idle')}"
    is_new = used < num_ranks or (used, here) != (num_before, before)
    return Plan(resume, text if is_new else "", used, *here[1:])


def fall_back(error: DamagedRun, resume: str | None) -> None:
    """Let `latest` of a run name its last good checkpoint, from which each restart continues. For rank 0."""
    if error.good is None or url_of(error.good) is not None or is_in_run(Path(resume or "")):
        raise error  # args.resume may be the damaged one itself
    write_text(error.good.with_name("latest"), error.good.name)
    logger.warning("%s; %s continues from it", error, _KEY)


def _resume(args: TrainKeys) -> str:
    """Return args.resume so that each restart continues from the newest checkpoint of the run."""
    if args.resume in (None, "auto", "latest"):
        return args.resume or "auto"
    if args.run_folder is not None:
        # A path is where the run began: the checkpoints in its own folder are newer.
        return args.resume if checkpoint_to_resume(args.changed(resume="auto")) is None else "auto"
    if is_in_run(Path(args.resume)):
        text = f"args.resume={args.resume}: with {_KEY}={args.elastic} each restart would return to it; set "
        text += "args.run_folder to the folder of the run that begins there, or args.resume to the folder of "
        raise args.problem("resume", f"{text}its run")
    return args.resume
