"""The cheapest changes of a configuration that make it fit on a card, each with its figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from cogfast.config import Config
from cogfast.schema.arguments import TrainArguments
from cogfast.train.plan.encoders import Encoders
from cogfast.train.plan.memory import (
    MemoryPlan,
    Setup,
    network_of,
    plan_memory,
    setup_of,
)
from cogfast.train.plan.state import ModelSize
from cogfast.train.plan.traffic import held_model

_MOST = 3  # changes that are named
_MOST_GPUS = 64
_MACHINE = 8  # GPUs
# Estimated share of a step's time that a change adds. Other GPUs cost no time but money.
_MICRO_BATCH, _TILES, _STAGE3, _TENSOR, _GPUS, _OFFLOAD = 0.03, 0.02, 0.2, 0.25, 0.6, 3.0
_NO_EVALUATION, _ADAPTERS = 0.05, 1.0  # what a user gives up
_RANK = 128  # of configs/lora.yaml
_RECOMPUTED = {"auto": 0.0, "none": 0.0, "pointwise": 0.04, "attention_kept": 0.2, "full": 0.33}


@dataclass(frozen=True, slots=True)
class Fix:
    """words: what to write. cost: estimated share of the step's time. plan: of the changed run."""

    words: str
    cost: float
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class _Change:
    """kind: one change of a kind is made at a time."""

    kind: str
    words: str
    cost: float
    apply: Callable[[Setup], Setup | None]


def find_fixes(config: Config, args: TrainArguments, plan: MemoryPlan) -> list[Fix]:
    """Return up to three changes that fit, the cheapest first; combinations where no single one fits."""
    if plan.card is None or plan.fits:
        return []
    changes = sorted(_changes(config, args, plan), key=lambda change: change.cost)
    for number in (1, 2, 3):
        tried = (c for c in combinations(changes, number) if len({x.kind for x in c}) == number)
        found: list[Fix] = []
        # More of the same, such as four GPUs where two suffice, comes after other kinds of changes.
        more: list[Fix] = []
        kinds: set[tuple[str, ...]] = set()
        for chosen in sorted(tried, key=lambda c: sum(change.cost for change in c)):
            fix = _try(plan, chosen)
            if fix is None:
                continue
            kind = tuple(sorted(change.kind for change in chosen))
            (more if kind in kinds else found).append(fix)
            kinds.add(kind)
            if len(found) == _MOST:
                break
        if found:
            return sorted([*found, *more][:_MOST], key=lambda fix: fix.cost)
    return []


def _try(plan: MemoryPlan, chosen: tuple[_Change, ...]) -> Fix | None:
    setup: Setup | None = plan.setup
    for change in chosen:
        setup = None if setup is None else change.apply(setup)
    if setup is None:
        return None
    changed = plan_memory(setup, plan.card)
    words = " ".join(change.words for change in chosen)
    cost = sum(change.cost for change in chosen)
    return Fix(words, cost, changed) if changed.fits else None


def _changes(config: Config, args: TrainArguments, plan: MemoryPlan) -> Iterator[_Change]:
    setup = plan.setup
    now = _RECOMPUTED[setup.choice]
    for policy in ("auto", "attention_kept", "full"):
        if policy != setup.choice and (policy == "auto" or _RECOMPUTED[policy] > now):
            extra = _RECOMPUTED[policy] - now if policy != "auto" else 0.01
            words = f"args.activation_checkpointing={policy}"
            change = lambda s, p=policy: dataclasses.replace(s, choice=p)
            yield _Change("policy", words, max(0.0, extra), change)
    yield from _encoder_changes(setup)
    yield from _batch_changes(config, args, setup)
    yield from _rank_changes(config, args, setup)
    if setup.eval_rows:
        words = "args.eval_interval=null args.eval_at_end=false"
        words += " args.eval_at_start=false" if args.eval_at_start else ""
        change = lambda s: dataclasses.replace(s, eval_rows=0, encoders=_without_evaluation(s))
        yield _Change("evaluation", words, _NO_EVALUATION, change)
    if setup.layer.is_frozen:
        return
    yield _Change(
        "adapters", "configs/lora.yaml (trains adapters alone)", _ADAPTERS, _adapted(config)
    )
    if setup.rules.stage < 3 and not setup.rules.is_offloaded:
        words = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
        change = lambda s: _with_rules(s, is_offloaded=True, is_fused=False)
        yield _Change("offload", words, _OFFLOAD, change)


def _with_rules(setup: Setup, **changes: object) -> Setup:
    rules = dataclasses.replace(setup.rules, **changes)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(setup, rules=rules)


def _without_evaluation(setup: Setup) -> Encoders:
    return dataclasses.replace(setup.encoders, in_evaluation=(False, False))


def _adapted(config: Config) -> Callable[[Setup], Setup]:
    """Return a function that gives a setup the adapters of configs/lora.yaml."""

    def apply(setup: Setup) -> Setup:
        network = dataclasses.replace(network_of(config), lora_rank=_RANK)
        transformer = held_model(network, setup.model_size)
        columns = len(network.lora_targets) * _RANK
        layer = dataclasses.replace(setup.layer, adapter_columns=columns, is_frozen=True)
        return dataclasses.replace(setup, model=ModelSize.of(transformer), layer=layer)

    return apply


def _encoder_changes(setup: Setup) -> Iterator[_Change]:
    encoders = setup.encoders
    if any(encoders.in_step) and encoders.encodes_clips:
        # Both leave the device before training begins.
        free = dataclasses.replace(encoders, in_step=(False, False), encodes_clips=False)
        words = "args.encode_first=true args.latent_cache=PATH"
        yield _Change("encoders", words, 0.0, lambda s: dataclasses.replace(s, encoders=free))
    if encoders.encodes_clips and encoders.mode == "auto":
        tiles = dataclasses.replace(encoders, mode="tiles")
        words = "model.first_stage_config.params.encode_chunks=tiles"
        yield _Change("encoders", words, _TILES, lambda s: dataclasses.replace(s, encoders=tiles))


def _batch_changes(config: Config, args: TrainArguments, setup: Setup) -> Iterator[_Change]:
    size = args.batch_size
    for divisor in (2, 4, 8):
        if size % divisor:
            return
        smaller, times = size // divisor, args.gradient_accumulation_steps * divisor
        words = (
            f"deepspeed.train_micro_batch_size_per_gpu={smaller} "
            f"deepspeed.gradient_accumulation_steps={times}"
        )
        changed = dataclasses.replace(args, batch_size=smaller, gradient_accumulation_steps=times)
        other = setup_of(config, changed, setup.world_size)
        yield _Change(
            "batch",
            words,
            _MICRO_BATCH * divisor / 2,
            lambda s, o=other: dataclasses.replace(
                s,
                layer=o.layer,
                encoders=dataclasses.replace(s.encoders, shape=o.encoders.shape),
                eval_rows=o.eval_rows,
                batch_bytes=o.batch_bytes,
                rules=dataclasses.replace(
                    s.rules, accumulation=o.rules.accumulation, sum_bytes=o.rules.sum_bytes
                ),
            ),
        )


def _rank_changes(config: Config, args: TrainArguments, setup: Setup) -> Iterator[_Change]:
    rules, parts = setup.rules, setup.model_size
    number = 2 * setup.world_size
    while number <= _MOST_GPUS and rules.stage >= 1 and not setup.layer.is_frozen:
        # A power of two above what is there, up to whole machines.
        copies = number // parts
        cost = _GPUS + 0.05 * (number > _MACHINE) * number / _MACHINE
        change = lambda s, c=copies: _with_rules(s, data_size=c)
        if number % parts == 0:
            yield _Change("ranks", f"{number} GPUs", cost + number / 1000, change)
        number *= 2
    if rules.data_size > 1 and rules.stage < 3:
        change = lambda s: (
            None if s.rules.data_size == 1 else _with_rules(s, stage=3, is_fused=False)
        )
        yield _Change("stage", "deepspeed.zero_optimization.stage=3", _STAGE3, change)
    heads = network_of(config).num_attention_heads
    for size in (2, 4):
        if size <= parts or setup.world_size % size or heads % size or setup.world_size < size:
            continue
        changed = dataclasses.replace(args, model_parallel_size=size)
        other = setup_of(config, changed, setup.world_size)
        yield _Change(
            "ranks",
            f"args.model_parallel_size={size}",
            _TENSOR * size / 2,
            lambda s, o=other: dataclasses.replace(
                s,
                model=o.model,
                layer=dataclasses.replace(s.layer, num_parts=o.layer.num_parts),
                rules=dataclasses.replace(s.rules, data_size=o.rules.data_size),
                model_size=o.model_size,
            ),
        )
