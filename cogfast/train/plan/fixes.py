"""The cheapest changes of a configuration that make it fit on a card, each with its figure.

find_fixes names some for the user to choose from; find_fit finds those that args.fit=auto makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, product

from cogfast.config import Config
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.merged_config import DEFAULT, find_origin
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
_COPIES = 0.02  # of activations, beside computation
_FETCHED_ENCODERS = 0.15
_HOST_EMA, _8BIT_MOMENTS = 0.01, 0.02
_NO_EVALUATION, _ADAPTERS = 0.05, 1.0  # what a user gives up
_OFFLOADED_BASE, _QUANTIZED_BASE = 0.02, 0.03  # all blocks
_RANK = 128  # of configs/lora.yaml
# Kinds of changes that args.fit=auto may make: keys alone, the same samples in each step.
_FITTING = {"policy", "copies", "encoders", "waiting encoders", "batch", "EMA", "moments"}
_FITTING |= {"offloaded base", "quantized base"}
# These round numbers of the run, so they come last.
_ROUNDING = {"moments", "quantized base"}
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


@dataclass(frozen=True, slots=True)
class Made:
    """A change that was made. cost: estimated share of the step's time. rounds: whether results differ
    by more than the order of sums."""

    words: str  # as on the command line
    cost: float
    rounds: bool


@dataclass(frozen=True, slots=True)
class Fitted:
    """changes: the cheapest first."""

    changes: tuple[Made, ...]
    plan: MemoryPlan

    @property
    def words(self) -> list[str]:
        return " ".join(change.words for change in self.changes).split()


def find_fit(config: Config, args: TrainArguments, plan: MemoryPlan) -> Fitted:
    """Return the changes of keys with which the run fits at the least cost, if possible without rounding.

    If none do, return those with the lowest peak.
    """
    offered = sorted(
        (c for c in _changes(config, args, plan) if c.kind in _FITTING and "=PATH" not in c.words),
        key=lambda change: (change.kind, change.cost),
    )
    # At most one change of a kind, in every combination.
    kinds = [(None, *changes) for _, changes in groupby(offered, lambda change: change.kind)]
    combined = sorted(
        (tuple(c for c in chosen if c is not None) for chosen in product(*kinds)),
        key=lambda chosen: sum(map(_fixed_cost, chosen)),
    )
    best, best_cost, least = None, 0.0, Fitted((), plan)
    for chosen in combined:
        fixed_cost = sum(map(_fixed_cost, chosen))
        # They come in the order of these costs, to which recomputation adds.
        if best is not None and fixed_cost >= best_cost:
            break
        changed = _plan_with(plan, chosen)
        if changed is None:
            continue
        made = sorted((_made(change, changed) for change in chosen), key=lambda c: c.cost)
        found = Fitted(tuple(made), changed)
        cost = fixed_cost + _recomputed(changed)
        if changed.fits and (best is None or cost < best_cost):
            best, best_cost = found, cost
        if changed.peak < least.plan.peak:
            least = found
    return best or least


def _fixed_cost(change: _Change) -> float:
    # A policy costs what the blocks of its plan recompute. One step's time is more than all others cost.
    return 0.0 if change.kind == "policy" else change.cost + (change.kind in _ROUNDING)


def _made(change: _Change, changed: MemoryPlan) -> Made:
    cost = _recomputed(changed) if change.kind == "policy" else change.cost
    return Made(change.words, cost, change.kind in _ROUNDING)


def _recomputed(plan: MemoryPlan) -> float:
    return sum(_RECOMPUTED[policy] for policy in plan.policies) / len(plan.policies)


def _try(plan: MemoryPlan, chosen: tuple[_Change, ...]) -> Fix | None:
    changed = _plan_with(plan, chosen)
    if changed is None or not changed.fits:
        return None
    words = " ".join(change.words for change in chosen)
    return Fix(words, sum(change.cost for change in chosen), changed)


def _plan_with(plan: MemoryPlan, chosen: Sequence[_Change]) -> MemoryPlan | None:
    """Return the plan after the changes; None if one of them does not apply."""
    setup: Setup | None = plan.setup
    for change in chosen:
        setup = None if setup is None else change.apply(setup)
    return None if setup is None else plan_memory(setup, plan.card)


def _changes(config: Config, args: TrainArguments, plan: MemoryPlan) -> Iterator[_Change]:
    setup = plan.setup
    now = _RECOMPUTED[setup.choice]
    for policy in ("auto", "attention_kept", "full"):
        if policy != setup.choice and (policy == "auto" or _RECOMPUTED[policy] > now):
            extra = _RECOMPUTED[policy] - now if policy != "auto" else 0.01
            words = f"args.activation_checkpointing={policy}"
            change = lambda s, p=policy: dataclasses.replace(s, choice=p)
            yield _Change("policy", words, max(0.0, extra), change)
    if not setup.offloads and not args.compile:
        change = lambda s: dataclasses.replace(s, offloads=True)
        yield _Change("copies", "args.offload_activations=true", _COPIES, change)
    yield from _encoder_changes(setup)
    yield from _batch_changes(config, args, setup)
    yield from _rank_changes(config, args, setup)
    if setup.eval_rows:
        words = "args.eval_interval=null args.eval_at_end=false"
        words += " args.eval_at_start=false" if args.eval_at_start else ""
        change = lambda s: dataclasses.replace(s, eval_rows=0, encoders=_without_evaluation(s))
        yield _Change("evaluation", words, _NO_EVALUATION, change)
    yield from _base_changes(setup)
    if setup.layer.is_frozen:
        return
    yield _Change(
        "adapters", "configs/lora.yaml (trains adapters alone)", _ADAPTERS, _adapted(config)
    )
    if setup.rules.has_ema and not setup.rules.is_offloaded:
        if not setup.rules.has_host_ema:
            change = lambda s: _with_rules(s, has_host_ema=True)
            yield _Change("EMA", "args.ema_device=cpu", _HOST_EMA, change)
        if not setup.rules.has_8bit_moments:
            change = lambda s: _with_rules(s, has_8bit_moments=True)
            yield _Change("moments", "args.optimizer_moments=8bit", _8BIT_MOMENTS, change)
    if setup.rules.stage < 3 and not setup.rules.is_offloaded:
        words = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
        change = lambda s: _with_rules(s, is_offloaded=True, is_fused=False, has_host_ema=False)
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


def _base_changes(setup: Setup) -> Iterator[_Change]:
    """Yield what makes the frozen base of LoRA smaller."""
    if not setup.model.base:
        return
    for number in (setup.num_layers // 2, setup.num_layers):
        if number <= setup.model.num_offloaded:
            continue
        cost = _OFFLOADED_BASE * number / setup.num_layers
        change = lambda s, n=number: _with_model(s, num_offloaded=n)
        yield _Change("offloaded base", f"args.offload_blocks={number}", cost, change)
    if not setup.model.is_quantized:
        change = lambda s: dataclasses.replace(
            _with_model(s, is_quantized=True),
            layer=dataclasses.replace(s.layer, dequantizes=True),
        )
        yield _Change("quantized base", "args.quantize_base=int8", _QUANTIZED_BASE, change)


def _with_model(setup: Setup, **changes: object) -> Setup:
    model = dataclasses.replace(setup.model, **changes)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(setup, model=model)


def _encoder_changes(setup: Setup) -> Iterator[_Change]:
    encoders = setup.encoders
    if any(encoders.in_step) and encoders.encodes_clips:
        # Both leave the device before training begins.
        free = dataclasses.replace(encoders, in_step=(False, False), encodes_clips=False)
        words = "args.encode_first=true args.latent_cache=PATH"
        yield _Change("encoders", words, 0.0, lambda s: dataclasses.replace(s, encoders=free))
    if (any(encoders.in_step) or any(encoders.in_evaluation)) and not encoders.are_offloaded:
        # T5's weights are copied to the device for each micro-batch that has captions.
        cost = _FETCHED_ENCODERS if encoders.in_step[0] else 0.0
        yield _Change("waiting encoders", "args.offload_encoders=true", cost, _offload_encoders)
    if encoders.encodes_clips and encoders.mode == "auto":
        tiles = dataclasses.replace(encoders, mode="tiles")
        words = "model.first_stage_config.params.encode_chunks=tiles"
        yield _Change("encoders", words, _TILES, lambda s: dataclasses.replace(s, encoders=tiles))


def _offload_encoders(setup: Setup) -> Setup:
    encoders = dataclasses.replace(setup.encoders, are_offloaded=True)
    return dataclasses.replace(setup, encoders=encoders)


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
        # Both sections must agree.
        for name, value in (("batch_size", smaller), ("gradient_accumulation_steps", times)):
            is_given = find_origin(config.origins, f"args.{name}") != DEFAULT
            words += f" args.{name}={value}" if is_given else ""
        changed = dataclasses.replace(args, batch_size=smaller, gradient_accumulation_steps=times)
        other = setup_of(config, changed, setup.world_size)
        yield _Change(
            "batch",
            words,
            _MICRO_BATCH * divisor / 2,
            lambda s, o=other: dataclasses.replace(
                s,
                layer=dataclasses.replace(s.layer, num_rows=o.layer.num_rows),
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
                model=dataclasses.replace(
                    o.model,
                    is_quantized=s.model.is_quantized,
                    num_offloaded=s.model.num_offloaded,
                ),
                layer=dataclasses.replace(s.layer, num_parts=o.layer.num_parts),
                rules=dataclasses.replace(s.rules, data_size=o.rules.data_size),
                model_size=o.model_size,
            ),
        )
