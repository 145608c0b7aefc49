"""Optimizers whose update needs more than this rank's elements: sums over the model, or whole matrices.

FusedStep gives them the layout of ZeRO's partitions (`pieces`) and calls `step` once for all groups.
Without it, as in one process without DeepSpeed, every parameter is one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cogfast.distributed.fused_step import Piece, ShardedOptimizer
from cogfast.kernels.fused_ema_adam import average_
from cogfast.model.weights.shard import join


class Prodigy(ShardedOptimizer):
    """Prodigy (arXiv 2306.06101, algorithm 4): Adam that estimates its learning rate d.

    With g the gradient, x0 the first weights, and sums over the whole model:

        r = b3 r + (d / d0) d lr sum(g (x0 - x))      s = b3 s + (d / d0) d lr g
        m = b1 m + (1 - b1) d g                       v = b2 v + (1 - b2) (d g)^2
        d' = max(d, d_coef r / sum(|s|))              x -= d lr m / (sqrt(v) + d' eps)

    So m, v and x are Adam's, with the gradient d g and the rate d lr. The defaults and the order of
    operations are those of the library prodigyopt 1.1.2, but for b1 = 0, where that library scales the
    gradient by the new d. `args.lr` is a factor of d, usually 1; a
    step with lr = 0, the first of a warm-up, changes nothing.

    State beside FusedEmaAdam's: s and x0 ("p0") per element, and d, d_max and d_numerator (r), which
    are equal for all parameters and on all ranks.
    """

    def __init__(
        self,
        params: Iterable,
        # factor of the estimated rate, usually 1; args.lr if it is left out
        lr: float = 1.0,
        # decay of the first and the second moment
        betas: tuple[float, float] = (0.9, 0.999),
        # decay of the sums that d is estimated from; null: the root of the second beta
        beta3: float | None = None,
        # added to the root of the second moment, times d
        eps: float = 1e-8,
        # weight decay; args.weight_decay if it is left out
        weight_decay: float = 0.0,
        # decoupled weight decay; false: added to the gradient
        decouple: bool = True,
        # Adam's bias correction
        use_bias_correction: bool = False,
        # leave lr out of the sum that the estimate is divided by, for a warm-up
        safeguard_warmup: bool = False,
        # first estimate of d
        d0: float = 1e-6,
        # factor of the estimate
        d_coef: float = 1.0,
        # d grows by this factor per step at most; null: no limit
        growth_rate: float | None = None,
        # decay of the averaged (EMA) weights
        ema_decay: float = 0.9999,
    ) -> None:
        for name, value in (("d0", d0), ("d_coef", d_coef), ("growth_rate", growth_rate)):
            if value is not None and not value > 0:
                raise ValueError(f"Prodigy {name}={value} must be above 0; leave it out")
        if beta3 is not None and not 0 <= beta3 < 1:
            raise ValueError(f"Prodigy beta3={beta3} must be in [0, 1); leave it out")
        super().__init__(
            params,
            lr,
            bias_correction=False,  # part of the rate
            betas=betas,
            eps=eps,
            adam_w_mode=decouple,
            weight_decay=weight_decay,
            ema_decay=ema_decay,
        )
        self.beta3 = math.sqrt(betas[1]) if beta3 is None else beta3
        self.use_bias_correction, self.safeguard_warmup = use_bias_correction, safeguard_warmup
        self.d_coef, self.growth_rate = d_coef, math.inf if growth_rate is None else growth_rate
        # Checkpoints keep d in float32, and d is compared with d0.
        self.d0 = torch.tensor(d0, dtype=torch.float32).item()
        self._rate, self._old_d, self._new_d = 0.0, 0.0, 0.0  # of the step under way

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = super().state_of(p)
        if "p0" not in state:
            state["s"] = torch.zeros(p.shape, device=p.device)
            state["p0"] = p.detach().to(torch.float32, copy=True)
        for key, value in (("d", self.d0), ("d_max", self.d0), ("d_numerator", 0.0)):
            if key not in state:
                state[key] = torch.tensor(value, device=p.device)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Estimate d from the gradients of the whole model, then update all parameters."""
        assert closure is None, "Prodigy takes no closure"
        params = [p for group in self.param_groups for p in group["params"]]
        # A rank that owns nothing of a parameter has no counters of it after a resume.
        owned = (p for p in params if any(piece.numel for piece in self.pieces_of(p)))
        first, lr = self.state_of(next(owned, params[0])), float(self.param_groups[0]["lr"])
        is_skipped = first["step"] * 0 if self.found_inf is None else self.found_inf
        numbers = [first[key] for key in ("d", "d_max", "d_numerator", "step")]
        numbers.append(is_skipped.reshape(()))
        # sync: the kernels take d as a number
        d, d_max, numerator, step, is_skipped = torch.stack(numbers).tolist()
        if is_skipped or lr == 0:
            return
        rate = d * lr
        if self.use_bias_correction:
            beta1, beta2 = self.param_groups[0]["betas"]
            rate *= math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
        product, total = self._sums(d / self.d0 * (d if self.safeguard_warmup else rate))
        if total == 0:
            return  # all gradients have been 0 so far
        numerator = self.beta3 * numerator + d / self.d0 * rate * product
        estimate = self.d_coef * numerator / total
        d_max = max(d_max, estimate)
        new_d = min(d_max, (max(d, estimate) if d == self.d0 else d) * self.growth_rate)
        self._rate, self._old_d, self._new_d = rate, d, new_d
        for p in params:
            for key, value in (("d", new_d), ("d_max", d_max), ("d_numerator", numerator)):
                self.state_of(p)[key].fill_(value)
        scale = self.gradient_scale
        self.gradient_scale = torch.full_like(first["d"], d) if scale is None else scale * d
        super().step()
        self.gradient_scale = scale

    def _sums(self, weight: float) -> tuple[float, float]:
        """Add the gradients, times `weight`, to s. Return sum(g (x0 - x)) and sum(|s|) of the model."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        own = [(g, p, x) for g in self.param_groups for p in g["params"] for x in self.pieces_of(p)]
        for group, p, piece in own:
            state, here = self.state_of(p), slice(piece.offset, piece.offset + piece.numel)
            weights, s, p0 = (x.view(-1)[here] for x in (p, state["s"], state["p0"]))
            g = self.gradient(p, here)
            if not self.adam_w_mode:
                g = g + group["weight_decay"] * weights
            s.mul_(self.beta3).add_(g, alpha=weight)
            if piece.is_counted:
                sums[0] += ((p0 - weights) * g).sum(dtype=torch.float64)
                sums[1] += s.abs().sum(dtype=torch.float64)
        if self.pieces is not None:
            # All ranks read the same sums, so that their d is the same.
            dist.all_reduce(sums)
        product, total = sums.tolist()  # sync: decides about d
        return product, total

    def update(self, params: list[Tensor], group: dict) -> None:
        # Decay that is added to the gradient is multiplied by d as the gradient is.
        decay = group["weight_decay"] * (1.0 if self.adam_w_mode else self._old_d)
        changed = {"lr": self._rate, "eps": group["eps"] * self._new_d, "weight_decay": decay}
        super().update(params, {**group, **changed})


# Coefficients of x -> a x + b x^3 + c x^5, which after five steps brings singular values near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
_RMS = 0.2  # of Adam's updates (arXiv 2502.16982, section 2.2)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T of each matrix U S V^T, [..., N, M], roughly, in its dtype: by Newton-Schulz steps."""
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=1e-30).to(x.dtype)
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


class Muon(ShardedOptimizer):
    """Muon (Keller Jordan, 2024) for the matrices of the blocks, AdamW for all other parameters.

    With g the gradient of a matrix [N, M], and u orthogonalized:

        m = momentum m + (1 - momentum) g      u = momentum m + (1 - momentum) g     (nesterov; else m)
        p -= lr (0.2 sqrt(max(N, M)) u + weight_decay p)

    The factor (arXiv 2502.16982) gives u the size of Adam's updates, so that both have one rate. A
    group with `num_parts` has the matrices; each consists of as many (q, k and v: 3), which are
    orthogonalized one by one, in bf16 on a GPU and in float32 on a CPU.

    ZeRO cuts matrices: as many as there are data-parallel ranks are put together at a time, one on each
    rank, which orthogonalizes it and sends it back. Tensor-parallel ranks first exchange their shards of
    it. State of matrices: exp_avg, shadow and step.
    """

    def __init__(
        self,
        params: Iterable,
        # peak learning rate of all parameters; args.lr if it is left out
        lr: float = 1e-3,
        # decay of the gradients' average of matrices
        momentum: float = 0.95,
        # step ahead along the average, as Nesterov
        nesterov: bool = True,
        # AdamW: decay of the first and the second moment
        betas: tuple[float, float] = (0.9, 0.95),
        # AdamW: added to the root of the second moment
        eps: float = 1e-8,
        # decoupled weight decay; args.weight_decay if it is left out
        weight_decay: float = 0.0,
        # decay of the averaged (EMA) weights
        ema_decay: float = 0.9999,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon momentum={momentum} must be in [0, 1); use 0.95")
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay, ema_decay=ema_decay
        )
        self.momentum, self.nesterov = momentum, nesterov

    def moments_of(self, p: Tensor) -> Sequence[str]:
        of_matrices = (g["params"] for g in self.param_groups if "num_parts" in g)
        is_matrix = any(p is one for params in of_matrices for one in params)
        return ("exp_avg",) if is_matrix else super().moments_of(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        # sync: all ranks skip the collectives of a step that changes nothing
        if self.found_inf is None or not self.found_inf.item():
            super().step(closure)

    def update(self, params: list[Tensor], group: dict) -> None:
        if "num_parts" not in group:
            super().update(params, group)
            return
        size = 1 if self.data_group is None else dist.get_world_size(self.data_group)
        for p in params:
            self.state_of(p)["step"] += 1
            pieces = self.pieces_of(p)
            for first in range(0, len(pieces), size):
                self._update_together(p, pieces[first : first + size], group)

    def _update_together(self, p: Tensor, pieces: list[Piece], group: dict) -> None:
        """Update at most as many matrices as there are data-parallel ranks; each rank has one of them."""
        wholes, ranks = [self._momentum(p, piece) for piece in pieces], self.data_group
        if ranks is None:
            wholes = [self._orthogonal(wholes[0], pieces[0], group["num_parts"])]
        else:
            for owner, whole in enumerate(wholes):
                # Every element is of one rank, and 0 on the others: the sums are exact.
                dist.reduce(whole, group=ranks, group_dst=owner)
            mine = dist.get_rank(ranks)
            if mine < len(wholes):
                wholes[mine] = self._orthogonal(wholes[mine], pieces[mine], group["num_parts"])
            for owner, whole in enumerate(wholes):
                dist.broadcast(whole, group=ranks, group_src=owner)
        state, copy = self.state_of(p), self.low_precision_copies.get(p)
        for piece, whole in zip(pieces, wholes, strict=True):
            cut = lambda x, piece=piece: x.view(-1).narrow(0, piece.offset, piece.numel)
            weights, update = cut(p.detach()), whole.narrow(0, piece.start, piece.numel).float()
            weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
            if self.other_ema is None:
                # The op is that of an average in host memory, so that both have the same numbers.
                weight = self.ema_weight(state["step"])
                average_(cut(state["shadow"]), weights, weight, self.kernels)
            if copy is not None:
                cut(copy).copy_(weights)

    def _momentum(self, p: Tensor, piece: Piece) -> Tensor:
        """Update this rank's part of the average; return the flat matrix with it, and 0 elsewhere."""
        dtype = torch.bfloat16 if p.is_cuda else torch.float32
        whole = torch.zeros(piece.shape.numel(), dtype=dtype, device=p.device)
        if piece.numel:
            here = slice(piece.offset, piece.offset + piece.numel)
            g, m = self.gradient(p, here), self.state_of(p)["exp_avg"].view(-1)[here]
            m.lerp_(g, 1 - self.momentum)
            u = g.lerp(m, self.momentum) if self.nesterov else m
            whole.narrow(0, piece.start, piece.numel).copy_(u)
        return whole

    def _orthogonal(self, flat: Tensor, piece: Piece, num_parts: int) -> Tensor:
        """Return a matrix, or this rank's shard of it, orthogonalized and scaled, flat."""
        matrix, shard = flat.view(piece.shape), piece.shard
        if shard is not None:
            shares = [torch.empty_like(matrix) for _ in range(shard.count)]
            dist.all_gather(shares, matrix, group=self.tensor_group)
            matrix = join(shares, shard.dim, shard.num_parts)
        parts = matrix.unflatten(0, (num_parts, -1))
        parts = orthogonalize(parts) * (_RMS * math.sqrt(max(parts.shape[1:])))
        matrix = parts.flatten(0, 1)
        return (matrix if shard is None else shard.of(matrix)).reshape(-1).contiguous()
