"""Predict the time of an optimizer step: the traced work of one GPU over its rates (gpus.py).

Matmul and attention take FLOPs over a share of the data sheet's rate, or bytes where they take longer,
all other ops and the optimizer bytes. Of communication and of transfers between host and GPU, those of
offloaded blocks and activations, what computation does not hide counts. GPUs send as in a ring: an
all-reduce of N bytes over n GPUs 2 (n-1)/n N, a reduce-scatter or an all-gather (n-1)/n N.

    per optimizer step    ZeRO-1               ZeRO-2                    ZeRO-3
    trained gradients     all-reduce           all-reduce each time      reduce-scatter each time
    weights               gather of trained    gather of trained         two gathers of all each time

"Each time" means for every micro-batch. Batches of latents and embeddings are assumed: the time of the VAE
and the text encoder is not in it, nor is an EMA in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from cogfast.extensions.plan.gpus import Gpu
from cogfast.extensions.plan.memory import MemoryPlan, Setup
from cogfast.extensions.plan.trace import Work
from cogfast.extensions.plan.zero import offloaded_blocks
from cogfast.extensions.prodigy_muon.optimizers import NUM_ITERATIONS
from cogfast.model.weights.shard import whole_shape
from cogfast.train.optimizer import muon_matrices
from cogfast.train.watchers.model_flops import train_flops

_LINK_BETWEEN = 45e9  # bytes/s of a GPU to other machines: a 400 Gbit/s card for each, at 90%
GPUS_PER_MACHINE = 8
_FP8_SPEED = 2  # rate of fp8 products, in multiples of bf16's, on every GPU that has them
_BACKWARD_PART = 2 / 3  # of the computation; communication of gradients can overlap it
PERSISTENT_NUMEL = 100_000  # ZeRO-3 keeps smaller parameters whole: DeepSpeed's default


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one GPU sends per optimizer step: gradients and weights to those with the same weights,
    `inside` to those that share a sample, by tensor and context parallelism."""

    gradients: float
    weights: float
    inside: float


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes that one GPU sends per optimizer step to its own machine and to others, and their seconds: of
    each link alone, of all without any computation, and those that computation does not hide."""

    machine_bytes: float
    network_bytes: float
    machine_seconds: float
    network_seconds: float
    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of an optimizer step. mfu: model FLOPs over the data sheet's rate.
    samples_per_second: of all GPUs. attention_rates: what was taken for them, in words."""

    matmul: float
    attention: float
    memory_bound: float
    links: Links
    transfers: float
    mfu: float
    samples_per_second: float
    attention_rates: str

    @property
    def seconds(self) -> float:
        computed = self.matmul + self.attention + self.memory_bound
        return computed + self.links.exposed + self.transfers


def micro_batch_work(plan: MemoryPlan) -> tuple[Work, Work]:
    """Return the work of a micro-batch in the blocks' forward pass, and all other."""
    setup = plan.setup
    forward, others = Work(), Work(setup.traces.edges(setup.size, setup.batch_size).work)
    for number, policy in enumerate(plan.policies):
        trace = setup.block(number, policy)
        forward.update(trace.forward_work)
        others.update(trace.backward_work)
    return forward, others


def count_traffic(setup: Setup, micro_batch: Work, persistent: int = PERSISTENT_NUMEL) -> Traffic:
    """Count what a GPU sends. persistent: stage3_param_persistence_threshold."""
    rules, trained = setup.rules, setup.num_trained
    times, ring = rules.accumulation, (rules.data_size - 1) / rules.data_size * rules.weight_bytes
    inside = sum(n * op.num_bytes for op, n in micro_batch.items() if op.kind == "sent")
    if rules.stage < 3:
        # DeepSpeed's ZeRO-2 all-reduces, as a bucket has gradients that several ranks own.
        gradients = (times if rules.stage == 2 else 1) * 2 * ring * trained
        # Each matrix of Muon goes to the rank that orthogonalizes it, and comes back, in bf16.
        is_cut = rules.is_muon and rules.data_size > 1
        both = 4 * sum(p.numel() for p in muon_matrices(setup.transformer)) if is_cut else 0
        return Traffic(gradients=gradients, weights=ring * trained + both, inside=times * inside)
    # ZeRO-3 keeps small parameters whole and gathers the rest in forward and in backward. This assumes
    # stage3_max_reuse_distance 0, and does not count gathers for recomputation.
    numels = [p.numel() for p in setup.transformer.parameters()]
    small = sum(numel for numel in numels if numel <= persistent)
    weights = ring * (2 * times * (sum(numels) - small) + small)
    return Traffic(gradients=times * ring * trained, weights=weights, inside=times * inside)


def predict_step(plan: MemoryPlan, gpu: Gpu, backend: str | None = None) -> StepTime | None:
    """Predict the time of a step with a backend of attention (None: of unknown shares); return None for
    sampling and for an optimizer in host memory."""
    setup, rules = plan.setup, plan.setup.rules
    if setup.is_sampling or rules.is_offloaded:
        return None
    forward, others = micro_batch_work(plan)
    of_forward, of_others = (_seconds(work, gpu, backend) for work in (forward, others))
    transfers = _transfers(plan, gpu, sum(of_forward.values()), sum(of_others.values()))
    times = rules.accumulation
    found = {kind: times * (of_forward[kind] + of_others[kind]) for kind in of_forward}
    if rules.is_muon:
        found["matmul"] += muon_flops(setup) / (gpu.shares.matmul * gpu.matmul_tflop_per_s * 1e12)
    # FusedStep moves the state in and out, gradients twice, and new weights.
    moved = rules.partition(setup.num_trained) * (2 * rules.sum_bytes + rules.weight_bytes)
    moved += 2 * (sum(setup.state.values()) - setup.state["weights"])
    found["memory"] += moved / (gpu.shares.memory * gpu.copy_tb_per_s * 1e12)
    computed = sum(found.values())
    links = _links(setup, forward + others, gpu, computed)
    seconds = computed + links.exposed + times * transfers
    samples = setup.batch_size * times * rules.data_size // setup.args.context_parallel_size
    config, share = setup.transformer.config, setup.transformer.sparse_share
    flops = samples * train_flops(config, setup.size.num_tokens(config), share) / setup.world_size
    return StepTime(
        matmul=found["matmul"],
        attention=found["attention"],
        memory_bound=found["memory"],
        links=links,
        transfers=times * transfers,
        mfu=flops / seconds / (gpu.matmul_tflop_per_s * 1e12),
        samples_per_second=samples / seconds,
        attention_rates=_attention_rates(gpu, backend, share is not None, forward),
    )


def _attention_rates(gpu: Gpu, backend: str | None, is_sparse: bool, forward: Work) -> str:
    """Describe the rates of attention, and those that nothing has measured."""
    shares = "% and ".join(f"{100 * share:.0f}" for share in gpu.shares.attention_of(backend))
    name = f"by {backend} " if backend else ""
    assumed = "" if backend in gpu.shares.attention else "an assumed "
    text = f"attention {name}at {assumed}{shares}% of the peak"
    if is_sparse:
        text += ", measured with dense attention alone"
    if any(op.kind == "fp8" for op in forward):
        text += f"; fp8 products at {_FP8_SPEED} times bf16's rate, which was not measured"
    return text


def _seconds(work: Work, gpu: Gpu, backend: str | None) -> dict[str, float]:
    """Return the seconds of matrix products, attention and other ops."""
    peak, shares = gpu.matmul_tflop_per_s * 1e12, gpu.shares
    attention, attention_backward = shares.attention_of(backend)
    rates = {
        "matmul": shares.matmul * peak,
        "fp8": _FP8_SPEED * shares.matmul * peak,
        "attention": attention * peak,
        "attention backward": attention_backward * peak,
    }
    copy = shares.memory * gpu.copy_tb_per_s * 1e12
    found: dict[str, float] = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    for op, times in work.items():
        if op.kind != "sent":
            name = "matmul" if op.kind == "fp8" else op.kind.split()[0]
            computed = op.flops / rates[op.kind] if op.flops else 0.0
            found[name] += times * max(computed, op.num_bytes / copy)
    return found


def muon_flops(setup: Setup) -> float:
    """Return the FLOPs by which a rank orthogonalizes its share of Muon's matrices."""
    flops = 0
    for parameter, num_parts in muon_matrices(setup.transformer).items():
        rows, columns = whole_shape(parameter)
        short, long = sorted((rows // num_parts, columns))
        flops += num_parts * NUM_ITERATIONS * (4 * short**2 * long + 2 * short**3)
    return flops / setup.rules.data_size


def _links(setup: Setup, micro_batch: Work, gpu: Gpu, computed: float) -> Links:
    rules, traffic = setup.rules, count_traffic(setup, micro_batch)
    rate = gpu.shares.link * gpu.link_gb_per_s * 1e9
    tensor, context = setup.args.model_parallel_size, setup.args.context_parallel_size
    is_inside = tensor * context <= GPUS_PER_MACHINE
    # Nothing is left to compute while rows and heads are exchanged.
    inside = traffic.inside / (rate if is_inside else min(rate, _LINK_BETWEEN))
    # A ring leaves a machine once, and uses the network cards of all its GPUs. The GPUs of a copy
    # are in rings of their own, which share the cards.
    leaves = setup.world_size > GPUS_PER_MACHINE
    part = 1 / max(1, GPUS_PER_MACHINE // tensor) if leaves else 0.0
    ring = min(rate, _LINK_BETWEEN / part) if leaves else rate
    between = traffic.gradients + traffic.weights
    network = part * between + (0 if is_inside else traffic.inside)
    machine = traffic.inside + between - network
    gradients, weights = traffic.gradients / ring, traffic.weights / ring
    total = inside + gradients + weights
    if rules.overlaps:
        # The gradients in the last bucket are sent when there is nothing left to compute.
        trained = setup.num_trained
        last = (trained % rules.bucket or min(trained, rules.bucket)) / trained
        gradients = max(last * gradients, gradients - _BACKWARD_PART * computed)
    if rules.stage == 3:
        # Gathers run ahead of the blocks that need them.
        weights = max(0.0, weights - (1 - _BACKWARD_PART) * computed)
    exposed = inside + gradients + weights
    return Links(machine, network, machine / rate, network / _LINK_BETWEEN, total, exposed)


def _transfers(plan: MemoryPlan, gpu: Gpu, forward: float, others: float) -> float:
    """Return the seconds of a micro-batch's copies between host and GPU that computation does not hide.

    In forward the two directions are used at once: the slower one counts.
    """
    rate, on_host = gpu.shares.link * gpu.host_gb_per_s * 1e9, plan.setup.host_parts(plan.policies)
    # Two blocks wait in their slots from one pass to the next.
    _, slots = offloaded_blocks(plan.setup.transformer)
    kept, blocks = on_host["activations"], max(0, on_host["blocks"] - slots)
    exposed = max(0.0, max(kept, blocks) / rate - forward)
    return exposed + max(0.0, (kept + blocks) / rate - others)
