"""DeepSpeed ZeRO around the transformer, and named access to its sharded state.

ZeRO flattens the trainable parameters into a few float32 vectors, of which every rank owns a part
("partition"). `ZeroEngine` maps partitions to parameters: a `Slice` says which elements of a
parameter this rank owns and where they are in its partition. Checkpoints, EMA evaluation and resume
use nothing else of DeepSpeed. Only this file and fused_step.py use private names of DeepSpeed 0.19.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from cogfast.distributed.fused_step import (
    BlockGather,
    FusedStep,
    ShardedOptimizer,
    WeightGather,
    own_weights,
    reason_for_stock_step,
)
from cogfast.distributed.keys import EngineKeys
from cogfast.distributed.process_groups import ModelParallelUnit
from cogfast.distributed.step_clock import StepClock
from cogfast.kernels import torch_library
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, coded_moment, largest_key
from cogfast.model.transformer import DiffusionTransformer

logger = logging.getLogger(__name__)

_MOVED = 1 << 24  # elements that move from host memory to the device at a time
# Micro-batches per step up to which gradients may be summed in bf16. At 32 the error is 7e-3.
_MOST_BF16_SUMMANDS = 4
_NEVER = 2**31  # steps between DeepSpeed's log lines
# Blocks of a collective inside a machine with NVLink, each on a multiprocessor; NCCL_MAX_CTAS
_NCCL_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, start + numel) of a flattened parameter, at `offset` in partition `part`.

    For a parameter sharded by tensor parallelism, elements of this rank's flattened shard.
    """

    parameter: str
    start: int
    numel: int
    part: int
    offset: int


def stage_and_sums(section: Mapping, args: EngineKeys) -> tuple[int, str | None]:
    """Return the ZeRO stage that runs, and the dtype in which micro-batches are summed (None: theirs).

    section: of the configuration, `deepspeed`. The sums of many bf16 micro-batches are float32 unless
    it says otherwise. In bf16 DeepSpeed has such sums where it partitions gradients, in stages 2 and 3.
    """
    dtype = (section.get("data_types") or {}).get("grad_accum_dtype")
    if dtype is None and args.bf16 and args.gradient_accumulation_steps > _MOST_BF16_SUMMANDS:
        dtype = "fp32"
    has_wide_sums = args.bf16 and dtype in ("fp32", "float32", "float")
    return max(args.zero_stage, 2 if has_wide_sums else 1), dtype


def deepspeed_config(given: Mapping[str, Any], args: EngineKeys) -> dict:
    """Return the section `deepspeed` as DeepSpeed expects it, for an optimizer that cogfast builds.

    Stage 0 runs as stage 1: the same update with sharded state. (DeepSpeed's bf16 optimizer of
    stage 0 is a different one and gives different losses.) `stage_and_sums` says which other runs do.
    """
    section = deepcopy(dict(given))
    for handled_here in ("optimizer", "scheduler", "train_batch_size"):
        section.pop(handled_here, None)
    section["train_micro_batch_size_per_gpu"] = args.batch_size
    section["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    section.setdefault("steps_per_print", _NEVER)
    # DeepSpeed's throughput timer adds two host-device syncs per micro-batch and is never printed.
    section.setdefault("timers", {"throughput": {"enabled": False}})
    section.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default is 1.0
    # DeepSpeed refuses an optimizer that it does not know, and with offload any but its own.
    section["zero_allow_untested_optimizer"] = True
    section["zero_force_ds_cpu_optimizer"] = False
    for name, is_on in (("bf16", args.bf16), ("fp16", args.fp16)):
        section[name] = {**(section.get(name) or {}), "enabled": is_on}
    zero = section.setdefault("zero_optimization", {})
    zero["stage"], sum_dtype = stage_and_sums(section, args)
    if zero["stage"] != args.zero_stage:
        what = "state" if zero["stage"] == 1 else "state and float32 sums of gradients"
        text = "ZeRO stage %d runs as stage %d: the same update with sharded %s"
        logger.warning(text, args.zero_stage, zero["stage"], what)
    if args.bf16 and zero["stage"] < 3:
        # Non-finite steps are skipped on the device instead (_guard_non_finite_steps).
        section["bf16"]["check_grad_overflow"] = False
    data_types = section.get("data_types") or {}
    if sum_dtype != data_types.get("grad_accum_dtype"):
        section["data_types"] = {**data_types, "grad_accum_dtype": sum_dtype}
        logger.info(
            "the gradients of %d micro-batches are accumulated in float32, which takes up to 2 more "
            "bytes per trained parameter, divided by the data-parallel ranks "
            "(deepspeed.data_types.grad_accum_dtype: bf16 keeps them in bf16)",
            args.gradient_accumulation_steps,
        )
    return section


def _import_muon() -> None:
    """Import DeepSpeed's Muon, which every engine imports, without preparing its compiled functions.

    Its module calls torch.compile, which imports TorchInductor: 1.4 s. cogfast builds the optimizer
    itself, so that nothing calls these functions.
    """
    from deepspeed.runtime import compiler

    compile_with_torch = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = compile_with_torch


def _fit_stage_3_to_checkpointing() -> None:
    """Change what selective activation checkpointing does not allow of DeepSpeed's ZeRO-3.

    Its linears add the bias to the product in place. Checkpointing keeps that product, so that
    recomputation would add the bias a second time and give wrong gradients.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return input.matmul(weight.t())
        rows = input.reshape(-1, input.shape[-1])
        return torch.addmm(bias, rows, weight.t()).view(*input.shape[:-1], -1)

    LinearFunctionForZeroStage3.forward = staticmethod(forward)


def _copy(source: Tensor, out: Tensor) -> None:
    """Round float32 values [N] to the training dtype; those in host memory move a part at a time."""
    size = source.numel() if source.device == out.device else _MOVED
    for values, place in zip(source.split(max(1, size)), out.split(max(1, size)), strict=True):
        place.copy_(values.to(out.device))


class ZeroEngine:
    """The transformer under DeepSpeed: forward, backward, step, and the sharded state by name.

    transformer: on the device, in its training dtype. optimizer: over its parameter groups.
    config: from `deepspeed_config`. mpu: DeepSpeed's model parallel unit, with the tensor- and
    data-parallel groups; None without tensor parallelism. timeout_s: how long a collective waits.
    clock: of the run's steps.
    tensor_rank, data_rank: this process's ranks in the tensor- and data-parallel group.

    `step` returns while the new weights are still being gathered. A forward pass, `publish`,
    `weights` and `whole` wait for them; call `wait_for_weights` before any other read. Master
    weights and optimizer state can be read without waiting.
    """

    def __init__(
        self,
        transformer: DiffusionTransformer,
        optimizer: torch.optim.Optimizer,
        config: dict,
        mpu: ModelParallelUnit | None = None,
        timeout_s: int | None = None,
        clock: StepClock | None = None,
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns about a custom optimizer
        import deepspeed

        # Building DeepSpeed's shared-memory op takes 18 s, and gloo does not need it. Reading the
        # table instead of replacing it would probe all of DeepSpeed's ops with a compiler.
        ops: Any = deepspeed.ops  # the module makes the table when it is first read
        ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        _import_muon()
        if config["zero_optimization"]["stage"] == 3:
            _fit_stage_3_to_checkpointing()
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(), dist_init_required=False, verbose=False
        )
        self.transformer = transformer
        self.clock = StepClock() if clock is None else clock
        self.optimizer: Any = optimizer  # a fused one also has found_inf
        self.tensor_rank, self.data_rank = 0, torch.distributed.get_rank()
        if mpu is not None:
            self.tensor_rank = mpu.get_model_parallel_rank()
            self.data_rank = mpu.get_data_parallel_rank()
        deepspeed.utils.groups.mpu = mpu  # DeepSpeed would keep an earlier engine's
        self.engine, _, _, _ = deepspeed.initialize(
            model=transformer, optimizer=optimizer, config=config, mpu=mpu, dist_init_required=False
        )
        if mpu is None and timeout_s is not None:
            # The group that DeepSpeed makes has torch's default of 10 or 30 minutes.
            group: Any = self.engine.data_parallel_group
            _set_pg_timeout(timedelta(seconds=timeout_s), group)
        self.zero: Any = self.engine.optimizer  # one of many classes, whose private names are used
        self.stage = config["zero_optimization"]["stage"]
        # Steps skipped for non-finite gradients, since the start and in a row; on the device, so that
        # counting needs no sync.
        self.num_skipped = torch.zeros((), device=self.engine.device)
        self.num_skipped_in_a_row = torch.zeros((), device=self.engine.device)
        self.found_inf: Tensor | None = None  # whether the current step is skipped
        # Parameters are compared by identity: DeepSpeed keeps the Parameter objects and replaces their data.
        names = {id(p): name for name, p in transformer.named_parameters()}
        if self.stage == 3:
            self.parts = self.zero.fp32_partitioned_groups_flat
            self.slices = list(self._stage3_slices(names))
        else:
            self.parts = self.zero.single_partition_of_fp32_groups
            self.slices = list(self._stage12_slices(names))
        options = config["zero_optimization"]
        overlaps = options.get("overlap_comm", self.stage == 3)  # DeepSpeed's default
        self._leave_multiprocessors(overlaps)
        self._gather = WeightGather(self.zero) if self.stage < 3 else None
        # Every forward pass waits, also those of evaluations.
        wait = self.wait_for_weights
        # A subclass may read a block's weights outside of it; weights in host memory have a source already.
        runtime = transformer.runtime
        is_plain = type(transformer) is DiffusionTransformer and runtime.source is None
        if self._gather is not None and is_plain:
            source = runtime.source = BlockGather(self._gather, transformer)
            wait = functools.partial(self._gather.wait, source.others)
        transformer.register_forward_pre_hook(lambda *_: wait())
        self.is_step_fused = self.stage < 3 and self._fuse_step()
        if self.stage < 3 and not self.is_step_fused and not self.engine.fp16_enabled():
            self._guard_non_finite_steps()
        self.allocate_state([])  # activations would cut the device's memory into pieces

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.engine(*inputs, **named)

    @property
    def grad_norm(self) -> Tensor:
        """Norm of the last step's gradient before clipping, over all ranks, on the device.

        Negative or not finite if the step was skipped.
        """
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32)

    @property
    def is_loss_scale_spent(self) -> Tensor:
        """Whether fp16's loss scale was at its minimum when gradients overflowed; on the device."""
        if self.is_step_fused and self.engine.fp16_enabled():
            return self.zero.loss_scaler.is_spent
        return torch.zeros_like(self.num_skipped)  # DeepSpeed's own step raises an exception

    def backward(self, loss: Tensor) -> None:
        with self.clock.part("backward"):
            value, number = loss.detach(), self.engine.gradient_accumulation_steps()
            # DeepSpeed's division, and NaN (0 times the loss) for one that is not finite: all ranks skip it.
            loss.register_hook(lambda grad: torch.add(grad / number, value, alpha=0))
            self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> None:
        """Update weights and EMA with learning rate `lr` if gradient accumulation is complete.

        With non-finite gradients on any rank it changes nothing and counts a skipped step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Asked before the step, which counts the micro-batch.
        is_update = self.engine.is_gradient_accumulation_boundary()
        with self.clock.part("optimizer"):
            self.engine.step()
            if not is_update:
                return
            if self.is_step_fused:
                self._count_skipped(self.optimizer.found_inf)
            elif self.stage == 3 or self.engine.fp16_enabled():
                self._count_skipped(float(self.zero.overflow))  # on the host already

    def wait_for_weights(self) -> None:
        """Wait until the last step's weights are gathered. Every rank calls this before it exits."""
        if self._gather is not None:
            self._gather.wait()

    def _count_skipped(self, is_skipped: Tensor | float) -> None:
        self.num_skipped += is_skipped
        # No branch, which would synchronize with the host; a finite step resets the number to 0.
        self.num_skipped_in_a_row = (self.num_skipped_in_a_row + 1) * is_skipped

    def _fuse_step(self) -> bool:
        """Replace DeepSpeed's step by FusedStep, or log why that is not possible."""
        reason = reason_for_stock_step(self.zero, self.optimizer)
        if reason is None:
            assert self._gather is not None, "stages 1 and 2 gather weights"
            FusedStep(self.zero, self._gather)
        elif isinstance(self.optimizer, ShardedOptimizer):
            text = f"deepspeed.optimizer.type={type(self.optimizer).__name__}: {reason}, and this optimizer needs "
            raise ValueError(f"{text}cogfast's step of ZeRO 1 and 2; use sat.ops.FusedEmaAdam")
        else:
            logger.info("ZeRO-%d uses DeepSpeed's own step: %s", self.stage, reason)
        return reason is None

    def _leave_multiprocessors(self, overlaps: bool) -> None:
        """Let backward kernels leave multiprocessors to NCCL where reductions overlap the backward pass."""
        number, device = 0, self.num_skipped.device
        is_shared = torch.distributed.get_world_size(self.zero.dp_process_group) > 1
        if device.type == "cuda" and overlaps and is_shared:
            given = os.environ.get("NCCL_MAX_CTAS", "")
            asked = torch.tensor(int(given) if given.isdigit() else _NCCL_BLOCKS, device=device)
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
            number = int(asked)  # sync: once
            logger.info("backward kernels leave %d multiprocessors to NCCL's reductions", number)
        # A kernel's order of sums depends on the number, which is that of all ranks and steps.
        torch_library.LEFT_MULTIPROCESSORS = number

    def _guard_non_finite_steps(self) -> None:
        """Make the optimizer skip steps with non-finite gradients, through a device scalar.

        DeepSpeed computes the global norm just before the optimizer's step and returns -1 for a
        non-finite one. In bf16 and fp32 nothing else stops such a step.
        """
        global_norm, update = self.zero.scaled_global_norm, self.optimizer.step

        def scaled_global_norm(norm_type: int = 2) -> Tensor:
            norm = global_norm(norm_type)
            found = self.found_inf = ((norm < 0) | ~torch.isfinite(norm)).float()
            if self._is_fused:  # it reads found_inf on the device
                self.optimizer.found_inf = found
            self._count_skipped(found)
            return norm

        def step(closure: None = None) -> None:
            assert self.found_inf is not None, "the norm is computed before the step"
            if not self.found_inf.item():  # sync: this optimizer cannot skip on the device
                update()

        self.zero.scaled_global_norm = scaled_global_norm
        if not self._is_fused:
            self.optimizer.step = step

    @property
    def _is_fused(self) -> bool:
        """Whether the optimizer keeps its counters and its decision to skip on the device."""
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return is_fused or isinstance(self.optimizer, FusedEmaAdam)

    def _stage12_slices(self, names: dict[int, str]) -> Iterator[Slice]:
        for part, group in enumerate(self.zero.bit16_groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                # None: this rank owns no element of the parameter.
                if mapping is not None:
                    at, where = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield Slice(names[id(parameter)], at.start, at.numel, part, where.start)

    def _stage3_slices(self, names: dict[int, str]) -> Iterator[Slice]:
        rank = torch.distributed.get_rank(group=self.zero.dp_process_group)
        parameters: Iterator[Any] = self.transformer.parameters()  # Any: DeepSpeed adds attributes
        for parameter in parameters:
            place = self.zero.grad_position.get(self.zero.get_param_id(parameter))
            if place is None:  # frozen
                continue
            # DeepSpeed pads every parameter to a multiple of the data-parallel size.
            part, offset, padded = place
            numel = min(padded, parameter.ds_numel - rank * padded)
            if numel > 0:
                yield Slice(names[id(parameter)], rank * padded, numel, part, offset)

    def state(self, part: int) -> dict:
        """Return the optimizer's state of one partition: flat float32 tensors and counters."""
        return self.optimizer.state[self.parts[part]]

    def state_kinds(self) -> list[str]:
        """Return the names of the optimizer's per-element state, such as exp_avg and shadow; Muon's
        matrices have no exp_avg_sq.

        Complete after `allocate_state` or the first step that is not skipped. The result is the same on every rank: a rank that owns only
        padding has a partition, too.
        """
        kinds = set()
        for part, whole in enumerate(self.parts):
            kept = self.state(part).items()
            kinds |= {k for k, v in kept if isinstance(v, Tensor) and v.shape == whole.shape}
        return sorted(kinds)

    def set_counter(self, part: int, key: str, value: float) -> None:
        """Set a scalar of the optimizer's state, such as its step count, from a checkpoint."""
        device = self.parts[part].device if self._is_fused else "cpu"  # as in torch's optimizers
        self.state(part)[key] = torch.tensor(value, device=device)

    def allocate_state(self, kinds: list[str]) -> None:
        """Allocate the optimizer's state before its first step; kinds: of other optimizers."""
        self.wait_for_ema()
        is_swapped = getattr(self.zero, "swap_optimizer", False)  # stage 3's state on NVMe
        for part in self.parts:
            if isinstance(self.optimizer, FusedEmaAdam):
                if not is_swapped:
                    self.optimizer.state_of(part)
                continue
            for kind in kinds:
                self.optimizer.state[part][kind] = torch.zeros_like(part, requires_grad=False)

    @contextmanager
    def filled(self, part: int, kind: str) -> Iterator[Tensor]:
        """Yield a flat float32 tensor for the "master" weights or a kind of optimizer state of a
        partition, which takes over its values at the end of the block."""
        if kind == "master" or largest_key(kind) not in self.state(part):
            yield (self.parts[part] if kind == "master" else self.state(part)[kind]).detach()
            return
        values = torch.zeros(self.parts[part].shape)
        yield values
        coded_moment(self.state(part), kind).encode(values)

    def wait_for_ema(self) -> None:
        """Wait, on the host, until the EMA is that of the last step, if it is in host memory."""
        if isinstance(self.optimizer, FusedEmaAdam) and self.optimizer.other_ema is not None:
            self.optimizer.other_ema.wait()

    @torch.no_grad()
    def publish(self, kind: str = "master") -> None:
        """Copy the "master" weights or the EMA ("shadow") into the model, on all ranks."""
        self.wait_for_weights()
        if kind == "shadow":
            self.wait_for_ema()
        sources = [p if kind == "master" else self.state(i)[kind] for i, p in enumerate(self.parts)]
        if self.stage == 3:
            # Parameters that are still gathered would keep their old values.
            self.zero._partition_all_parameters()
            for i, source in enumerate(sources):
                _copy(source, self.zero.fp16_partitioned_groups_flat[i].data)
                self.zero._unflatten_partitioned_parameters(i)
            # Every rank keeps the parameters below stage 3's persistence threshold whole.
            if small := self.zero.persistent_parameters:
                small[0].all_gather(small)
            return
        for weights, source in zip(own_weights(self.zero), sources, strict=True):
            _copy(source, weights.data)
        assert self._gather is not None, "stages 1 and 2 gather weights"
        self._gather.start()
        self._gather.wait()

    @contextmanager
    def weights(self, kind: str) -> Iterator[None]:
        """Use the weights of `kind` ("master" or "shadow") in the model within the block.

        After an error the master weights do not come back: the other ranks would not join their gather.
        """
        if kind == "master":
            self.wait_for_weights()
            yield
            return
        self.publish(kind)
        yield
        self.publish("master")

    @contextmanager
    def whole(self, parameter: nn.Parameter, is_written: bool = False) -> Iterator[Tensor]:
        """Gather a frozen parameter's values, which ZeRO-3 partitions too. Every rank must call it.

        is_written: rank 0's changes are sent to all ranks at the end of the block.
        """
        self.wait_for_weights()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        # This has no effect in stages 1 and 2, which keep every parameter whole on each rank.
        with GatheredParameters([parameter], modifier_rank=0 if is_written else None):
            yield parameter.data

    def loss_scaler_state(self) -> dict:
        """Return fp16's loss scale and its counters as plain numbers; {} for other dtypes."""
        scaler = getattr(self.zero, "loss_scaler", None)
        if scaler is None or not self.engine.fp16_enabled():
            return {}
        plain = lambda x: x.item() if isinstance(x, Tensor) else x  # sync: in a save alone
        numbers = {k: plain(v) for k, v in vars(scaler).items() if not k.startswith("_")}
        return {k: v for k, v in numbers.items() if isinstance(v, (int, float, bool))}

    def load_loss_scaler_state(self, state: dict) -> None:
        """Continue with a checkpoint's dynamic loss scale; the configuration decides its settings."""
        if not (state.get("dynamic") and self.loss_scaler_state().get("dynamic")):
            return
        for key in {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"} & state.keys():
            value, old = state[key], getattr(self.zero.loss_scaler, key)
            if isinstance(old, Tensor):  # DeviceLossScaler's
                value = torch.full_like(old, value)
            setattr(self.zero.loss_scaler, key, value)
