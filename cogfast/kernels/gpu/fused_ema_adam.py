"""Triton kernels of FusedEmaAdam: one launch for many tensors, no value read by the host.

A table on the device holds each tensor's addresses, length and count of updates; a map tells a
program which tensor it works on. A small kernel counts the updates and turns the counts into
factors in float64; the second kernel streams over all tensors once. Each of its programs takes
1,024 neighbouring elements (4 KB of float32). With bf16 gradients and float32 weights it moves 36
bytes per element, 2 more with a bf16 copy of the weights; 12 fewer with 8-bit moments, whose codes
extensions/memory/moment_codes.py explains, and 8 fewer without the EMA. An H100 reaches 96 to 99% of its
copy rate.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from cogfast.kernels.fused_ema_adam import MOMENT_BLOCK, AdamStreams
from cogfast.kernels.gpu.launch import cdiv, jit

BLOCK = 1024  # elements of a program
NUM_WARPS = 8  # four elements per thread: float32 and bf16 streams have one layout
STEP_BLOCK = 128  # tensors whose updates one program of the first kernel counts

# Columns of the table [num_tensors, 16] int64, one cache line per tensor: addresses in the order of
# AdamStreams, then the length and the first block.
_P, _G, _M, _V, _SHADOW, _COPY = (tl.constexpr(column) for column in range(6))
_LARGEST_M, _LARGEST_V, _STEP, _NUMEL, _FIRST_BLOCK = (tl.constexpr(n) for n in range(6, 11))
_COLUMNS = tl.constexpr(16)
# Columns of the factors [num_tensors, 4] float32.
_STEP_SIZE, _ROOT_FACTOR, _EMA_WEIGHT, _DECAY = (tl.constexpr(column) for column in range(4))
_FACTORS = tl.constexpr(4)
_SHIFT = tl.constexpr(20)  # bits of a float32 that a code has not


@jit
def ema_adam_factors_kernel(
    table_ptr,  # [num_tensors, 16] int64
    factors_ptr,  # [num_tensors, 4] float32
    num_tensors,
    lr,  # float32, ignored if lr_ptr is given
    lr_ptr,  # [] or None
    found_inf_ptr,  # [] or None
    log2_beta1,  # -inf: no bias correction
    log2_beta2,
    weight_decay,
    least_ema_weight,  # 1 - ema_decay
    USE_NUM_UPDATES: tl.constexpr,
    BLOCK_TENSORS: tl.constexpr,
):
    """Count one update of every tensor and compute its factors from the count."""
    tensor = tl.program_id(0) * BLOCK_TENSORS + tl.arange(0, BLOCK_TENSORS)
    if found_inf_ptr is not None:
        # A skipped step masks every tensor, so that no count changes.
        num_tensors = tl.where(tl.load(found_inf_ptr) == 0, num_tensors, 0)
    inside = tensor < num_tensors
    step_ptr = tl.load(table_ptr + tensor * _COLUMNS + _STEP, mask=inside, other=0)
    step_ptr = step_ptr.to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=inside, other=0.0) + 1
    tl.store(step_ptr, step, mask=inside)

    t = step.to(tl.float64)
    # log2(beta) in float32 gives 1 - beta^t float32's relative precision from t = 1 on.
    correction1 = 1 - tl.exp2(t * log2_beta1)
    correction2 = 1 - tl.exp2(t * log2_beta2)
    rate = tl.zeros([BLOCK_TENSORS], tl.float64)
    if lr_ptr is not None:
        rate += tl.load(lr_ptr)
    else:
        rate += lr
    ema_weight = tl.zeros([BLOCK_TENSORS], tl.float64) + least_ema_weight
    if USE_NUM_UPDATES:
        ema_weight = tl.maximum(ema_weight, 9 / (10 + t))  # 1 - (1 + t) / (10 + t)
    row = factors_ptr + tensor * _FACTORS
    tl.store(row + _STEP_SIZE, (rate / correction1).to(tl.float32), mask=inside)
    tl.store(row + _ROOT_FACTOR, (1 / tl.sqrt(correction2)).to(tl.float32), mask=inside)
    tl.store(row + _EMA_WEIGHT, ema_weight.to(tl.float32), mask=inside)
    tl.store(row + _DECAY, (rate * weight_decay).to(tl.float32), mask=inside)


@jit
def _stream(address, element, TYPE: tl.constexpr, IS_WIDE: tl.constexpr):
    """Return pointers to a block's elements, [BLOCK]."""
    # Triton casts integers to pointers, but declares `to` for number types only.
    pointer = address.to(tl.pointer_type(TYPE)) + element  # pyright: ignore[reportArgumentType]
    if IS_WIDE:
        # Hint at the sum: Triton drops a hint on an integer that is cast to a pointer.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _scramble(x):
    """Hash numbers, uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _base(largest, IS_SIGNED: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr):
    """Return what the codes of a moment count from, [BLOCK]; largest: [BLOCK / 256] int32."""
    base = tl.maximum(largest - (127 if IS_SIGNED else 255), 0)
    return tl.reshape(tl.broadcast_to(base[:, None], [BLOCK // CODED, CODED]), [BLOCK])


@jit
def load_codes(
    codes_ptr,  # [BLOCK]
    largest_ptr,  # [BLOCK / 256]
    inside,
    is_begun,
    IS_SIGNED: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a block of a moment, [BLOCK] float32, from 8-bit codes."""
    codes = tl.load(codes_ptr, mask=inside).to(tl.int32)
    level = codes & 127 if IS_SIGNED else codes
    base = _base(tl.load(largest_ptr, mask=is_begun).to(tl.int32), IS_SIGNED, CODED, BLOCK)
    bits = tl.where(level > 0, level + base, 0) << _SHIFT
    if IS_SIGNED:
        bits |= (codes >> 7) << 31
    return bits.to(tl.float32, bitcast=True)


@jit
def _store_codes(
    address,
    largest_ptr,  # [BLOCK / 256]
    element,
    inside,
    is_begun,
    x,
    r,  # random numbers from 0 to 2^16 - 1, int32
    IS_SIGNED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of a moment, x, as 8-bit codes."""
    raw = x.to(tl.int32, bitcast=True)
    bits = raw & 0x7FFFFFFF
    if not IS_WIDE:
        bits = tl.where(inside, bits, 0)
    most = tl.max(tl.reshape(bits, [BLOCK // CODED, CODED]), 1)
    largest = (most + 0xFFFFF) >> _SHIFT
    base = _base(largest, IS_SIGNED, CODED, BLOCK)
    level = ((bits + (r << 4)) >> _SHIFT) - base
    if IS_SIGNED:
        smallest = ((base + 1) << _SHIFT).to(tl.float32, bitcast=True)
        is_kept = r.to(tl.float32) * smallest < bits.to(tl.float32, bitcast=True) * 65536
        code = tl.where(level < 1, is_kept.to(tl.int32), level) | ((raw >> 31) & 1) << 7
    else:
        code = tl.where(level < 1, (bits > 0).to(tl.int32), level)
    tl.store(_stream(address, element, tl.uint8, IS_WIDE), code.to(tl.uint8), mask=inside)
    tl.store(largest_ptr, largest.to(tl.int16), mask=is_begun)


@jit
def _update(
    addresses,  # of p, g, m, v, shadow, copy, and of the largest codes of m and v
    start,  # of the block, int64
    numel,  # of the tensor
    scale,
    factors_ptr,  # of this tensor
    numbers,  # 1 - beta1, beta2, 1 - beta2, eps, weight_decay
    seed,  # of the random rounding, uint32
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    COPY_TYPE: tl.constexpr,
    ADAM_W_MODE: tl.constexpr,
    HAS_SHADOW: tl.constexpr,
    CODED: tl.constexpr,
    IS_WIDE: tl.constexpr,  # the block is full and all addresses are multiples of 16
    BLOCK: tl.constexpr,
):
    """Update a block with Adam and the EMA: load, compute in float32, store."""
    element = start + tl.arange(0, BLOCK)
    inside = None if IS_WIDE else element < numel
    p_address, g_address, m_address, v_address = addresses[:4]
    shadow_address, copy_address, largest_m, largest_v = addresses[4:]
    one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay = numbers
    p_ptr = _stream(p_address, element, P_TYPE, IS_WIDE)
    p = tl.load(p_ptr, mask=inside).to(tl.float32)
    g = tl.load(_stream(g_address, element, G_TYPE, IS_WIDE), mask=inside).to(tl.float32) * scale
    is_begun = None
    if CODED:
        coded = start // CODED + tl.arange(0, BLOCK // CODED)
        is_begun = None if IS_WIDE else coded * CODED < numel
        largest_m = largest_m.to(tl.pointer_type(tl.int16)) + coded
        largest_v = largest_v.to(tl.pointer_type(tl.int16)) + coded
        m_codes = _stream(m_address, element, tl.uint8, IS_WIDE)
        m = load_codes(m_codes, largest_m, inside, is_begun, True, CODED, BLOCK)
        v_codes = _stream(v_address, element, tl.uint8, IS_WIDE)
        v = load_codes(v_codes, largest_v, inside, is_begun, False, CODED, BLOCK)
    else:
        m = tl.load(_stream(m_address, element, tl.float32, IS_WIDE), mask=inside)
        v = tl.load(_stream(v_address, element, tl.float32, IS_WIDE), mask=inside)
    shadow = p
    if HAS_SHADOW:
        shadow = tl.load(_stream(shadow_address, element, tl.float32, IS_WIDE), mask=inside)
    if ADAM_W_MODE:
        p -= tl.load(factors_ptr + _DECAY) * p
    else:
        g += weight_decay * p
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    # Correctly rounded, as torch's; the fast root and division differ in the last bits.
    root = tl.sqrt_rn(v) * tl.load(factors_ptr + _ROOT_FACTOR)
    p -= tl.load(factors_ptr + _STEP_SIZE) * tl.div_rn(m, root + eps)
    tl.store(p_ptr, p.to(P_TYPE), mask=inside)
    if CODED:
        random = _scramble(element.to(tl.uint32) ^ seed)
        low, high = (random & 0xFFFF).to(tl.int32), (random >> 16).to(tl.int32)
        _store_codes(
            m_address, largest_m, element, inside, is_begun, m, low, True, IS_WIDE, CODED, BLOCK
        )
        _store_codes(
            v_address, largest_v, element, inside, is_begun, v, high, False, IS_WIDE, CODED, BLOCK
        )
    else:
        tl.store(_stream(m_address, element, tl.float32, IS_WIDE), m, mask=inside)
        tl.store(_stream(v_address, element, tl.float32, IS_WIDE), v, mask=inside)
    if HAS_SHADOW:
        shadow += tl.load(factors_ptr + _EMA_WEIGHT) * (p - shadow)
        tl.store(_stream(shadow_address, element, tl.float32, IS_WIDE), shadow, mask=inside)
    if COPY_TYPE is not None:
        copy_ptr = _stream(copy_address, element, COPY_TYPE, IS_WIDE)
        tl.store(copy_ptr, p.to(COPY_TYPE), mask=inside)


@jit
def ema_adam_kernel(
    table_ptr,  # [num_tensors, 16] int64
    tensor_of_block_ptr,  # [blocks of all tensors] int32
    factors_ptr,  # [num_tensors, 4] float32
    scale_ptr,  # [], factor for the gradients, or None
    found_inf_ptr,  # [] or None
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    P_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    COPY_TYPE: tl.constexpr,  # or None
    ADAM_W_MODE: tl.constexpr,
    HAS_SHADOW: tl.constexpr,
    CODED: tl.constexpr,  # elements that share the largest code of 8-bit moments; 0: float32
    BLOCK: tl.constexpr,
):
    """Update one block of one tensor, unless found_inf is not 0."""
    is_live = True
    if found_inf_ptr is not None:
        is_live = tl.load(found_inf_ptr) == 0
    if is_live:
        scale = 1.0
        if scale_ptr is not None:
            scale = tl.load(scale_ptr).to(tl.float32)
        tensor = tl.load(tensor_of_block_ptr + tl.program_id(0)).to(tl.int64)
        factors_ptr += tensor * _FACTORS
        row = table_ptr + tensor * _COLUMNS
        p, g, m = tl.load(row + _P), tl.load(row + _G), tl.load(row + _M)
        v, shadow, copy = tl.load(row + _V), tl.load(row + _SHADOW), tl.load(row + _COPY)
        # Offsets are int64: one ZeRO partition may have more than 2^31 elements.
        start = (tl.program_id(0) - tl.load(row + _FIRST_BLOCK)) * BLOCK
        numel = tl.load(row + _NUMEL)
        largest_m, largest_v = tl.load(row + _LARGEST_M), tl.load(row + _LARGEST_V)
        addresses = (p, g, m, v, shadow, copy, largest_m, largest_v)
        seed = tl.zeros([], tl.uint32)
        if CODED:
            step = tl.load(tl.load(row + _STEP).to(tl.pointer_type(tl.float32)))
            seed = _scramble(step.to(tl.uint32))
        numbers = (one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay)
        # 16-byte accesses (bf16: 8) need a full block and aligned addresses of every stream.
        if (start + BLOCK <= numel) & ((p | g | m | v | shadow | copy) % 16 == 0):
            _update(
                addresses,
                start,
                numel,
                scale,
                factors_ptr,
                numbers,
                seed,
                P_TYPE,
                G_TYPE,
                COPY_TYPE,
                ADAM_W_MODE,
                HAS_SHADOW,
                CODED,
                IS_WIDE=True,
                BLOCK=BLOCK,
            )
        else:
            # One element per thread at a time takes few registers and keeps the stores' layout.
            for first in range(0, BLOCK, BLOCK // 4):
                _update(
                    addresses,
                    start + first,
                    numel,
                    scale,
                    factors_ptr,
                    numbers,
                    seed,
                    P_TYPE,
                    G_TYPE,
                    COPY_TYPE,
                    ADAM_W_MODE,
                    HAS_SHADOW,
                    CODED,
                    IS_WIDE=False,
                    BLOCK=BLOCK // 4,
                )


@jit
def average_kernel(
    shadow_ptr,  # [n] float32
    p_ptr,  # [n] float32
    weight_ptr,  # [] float32
    n,
    BLOCK: tl.constexpr,
):
    """Update a block of an EMA."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < n
    shadow = tl.load(shadow_ptr + element, mask=inside)
    shadow += tl.load(weight_ptr) * (tl.load(p_ptr + element, mask=inside) - shadow)
    tl.store(shadow_ptr + element, shadow, mask=inside)


def blocks_of(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each tensor's number of blocks and the index of its first block in the launch."""
    counts = [-(-length // BLOCK) for length in lengths]
    return counts, [0, *accumulate(counts)][:-1]


class TensorTable:
    """Table of a launch's tensors, kept on the device between steps.

    The table is copied to the device only if a tensor has moved, and the map of blocks is rebuilt
    only if a length has changed. The host waits for neither.
    """

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.lengths: list[int] = []
        self.num_blocks = 0
        self.dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] | None = None
        self.has_shadow, self.is_coded = True, False

    def hold(self, tensors: Sequence[AdamStreams]) -> None:
        """Fill the table with `tensors`, which have the same streams, dtypes and device."""
        # 0 stands for a stream that is not there.
        rows = [[0 if x is None else x.data_ptr() for x in streams] for streams in tensors]
        lengths = [t.p.numel() for t in tensors]
        # The usual step: PyTorch's allocator gave the gradients the same addresses again.
        if rows == self.rows and lengths == self.lengths:
            return
        device = tensors[0].p.device
        counts, first_blocks = blocks_of(lengths)
        if lengths != self.lengths:
            self.num_blocks = sum(counts)
            self.tensor_of_block = torch.repeat_interleave(
                torch.arange(len(counts), dtype=torch.int32, device=device),
                _upload(torch.tensor(counts), device),
                output_size=self.num_blocks,  # without it the host reads the sum from the device
            )
            self.factors = torch.empty(len(rows), _FACTORS.value, device=device)
        table = torch.zeros(len(rows), _COLUMNS.value, dtype=torch.int64)
        places = zip(rows, lengths, first_blocks, strict=True)
        table[:, :11] = torch.tensor([[*row, n, first] for row, n, first in places])
        self.table = _upload(table, device)
        self.rows, self.lengths = rows, lengths
        self.dtypes = tensors[0].dtypes
        self.has_shadow = tensors[0].shadow is not None
        self.is_coded = tensors[0].largest_m is not None


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting."""
    # PyTorch keeps the pinned pages until the copy is done.
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def launch_ema_adam(
    tensors: TensorTable,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    adam_w_mode: bool,
    ema_decay: float,
    use_num_updates: bool,
    gradient_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update every tensor of the table, unless found_inf is not 0.

    lr: a number, or a tensor [] on the device, which the kernel reads. gradient_scale: factor for
    the gradients, []. found_inf: flag, [].
    """
    beta1, beta2 = betas
    # Differences from 1 are computed in float64 here: float32 would lose their last digits.
    num_tensors = len(tensors.rows)
    is_device_lr = isinstance(lr, Tensor) and lr.device == tensors.table.device
    logarithms = [math.log2(b) if bias_correction and b else -math.inf for b in betas]
    ema_adam_factors_kernel[(cdiv(num_tensors, STEP_BLOCK),)](
        tensors.table,
        tensors.factors,
        num_tensors,
        0.0 if is_device_lr else float(lr),
        lr if is_device_lr else None,
        found_inf,
        *logarithms,
        weight_decay,
        1 - ema_decay,
        USE_NUM_UPDATES=use_num_updates,
        BLOCK_TENSORS=STEP_BLOCK,
        num_warps=4,
    )
    # An empty grid is an error, and empty tensors have no blocks.
    if not tensors.num_blocks:
        return
    assert tensors.dtypes is not None, "hold() sets the dtypes"
    p_type, g_type, copy_type = (
        None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))
        for dtype in tensors.dtypes
    )
    ema_adam_kernel[(tensors.num_blocks,)](
        tensors.table,
        tensors.tensor_of_block,
        tensors.factors,
        gradient_scale,
        found_inf,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        weight_decay,
        P_TYPE=p_type,
        G_TYPE=g_type,
        COPY_TYPE=copy_type,
        ADAM_W_MODE=adam_w_mode,
        HAS_SHADOW=tensors.has_shadow,
        CODED=MOMENT_BLOCK if tensors.is_coded else 0,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def launch_average(shadow: Tensor, p: Tensor, weight: Tensor) -> None:
    """Compute shadow += weight (p - shadow) as the kernel above does; float32, one length."""
    n = shadow.numel()
    assert n < 2**31, f"{n} elements: the kernel's offsets are int32"
    average_kernel[(cdiv(n, BLOCK),)](shadow, p, weight, n, BLOCK=BLOCK, num_warps=4)
