"""cogfast's kernels in diffusers' CogVideoXTransformer3DModel: `apply_to_diffusers`, undone by `restore`.

The transformer and its blocks get a subclass of their class whose forward calls the kernels; nothing else
changes. At every call, a module whose parts were exchanged (processors, quantized linears) or that has
hooks (offloading, ZeRO-3) runs diffusers' own code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels.add_low_rank import add_low_rank, read_low_rank
from cogfast.kernels.attention_backends import flash_attention
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import EPS, Rotation, qk_norm_rope3d

_Part = Callable[..., tuple[Tensor, Tensor | None]]
_MOST_WIDTH = 128  # head width of the GPU's kernel
_IS_ROTATION: dict[tuple[int, ...], bool] = {}  # by frames, rows, columns and head width


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether calling a module only runs the forward of `kind`."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    # Offloading and casting of diffusers and accelerate give an instance a forward of its own.
    is_changed = any(hooks) or module._backward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not is_changed


def _is_norm(module: nn.Module) -> bool:
    return _is_plain(module, nn.LayerNorm) and (module.weight is None) == (module.bias is None)


def _take_apart(layer: Any, lora: Any) -> tuple[nn.Linear, tuple[Any, ...]] | None:
    """Return a layer's linear, and A, B and scaling of its adapter or (); None if it computes more."""
    linear, adapter = layer, ()
    if _is_plain(layer, lora):
        linear, names = layer.base_layer, [n for n in layer.active_adapters if n in layer.lora_A]
        if layer.merged or layer.disable_adapters or layer.lora_variant or len(names) > 1:
            return None
        for name in names:
            a, b = layer.lora_A[name], layer.lora_B[name]
            # PEFT computes in the adapter's dtype unless autocast chooses it.
            is_cast = torch.is_autocast_enabled(a.weight.device.type)
            is_same = is_cast or a.weight.dtype == linear.weight.dtype
            is_known = all(_is_plain(x, nn.Linear) and x.bias is None for x in (a, b)) and is_same
            if not is_known or type(layer.lora_dropout[name]) is not nn.Identity:
                return None
            adapter = (a.weight, b.weight, layer.scaling[name])
    # Quantized weights are parameters of a type of their own.
    is_known = _is_plain(linear, nn.Linear) and type(linear.weight) in (nn.Parameter, Tensor)
    return (linear, adapter) if is_known else None


def _product(
    layers: Sequence[nn.Module], x: Tensor, lora: Any, adds_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of layers, side by side, and the bias that they still need, or None."""
    join = lambda tensors, dim=0: tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
    # torch.compile takes no := in a comprehension.
    apart = [one for one in [_take_apart(layer, lora) for layer in layers] if one is not None]
    adapters = {part: adapter for part, (_, adapter) in enumerate(apart) if adapter}
    a, b, scalings = map(list, zip(*adapters.values(), strict=True)) if adapters else ([], [], [])
    # One call adds the adapters of q, k and v, if they are alike.
    is_one_call = len({(len(m), scaling) for m, scaling in zip(a, scalings, strict=True)}) <= 1
    are_alike = len(apart) == len(layers) and len({one.bias is None for one, _ in apart}) == 1
    if not are_alike or not is_one_call:
        return join([layer(x) for layer in layers], -1), None
    # The weights of q, k and v side by side: to copy them takes less than to copy their products.
    weight = join([linear.weight for linear, _ in apart])
    bias = None if apart[0][0].bias is None else join([linear.bias for linear, _ in apart])
    low = None
    if a:
        is_cast = torch.is_autocast_enabled(x.device.type)
        x, low = (x, F.linear(x, join(a))) if is_cast else read_low_rank(x, join(a))
    product = F.linear(x, weight, bias if adds_bias else None)
    if low is not None:
        b = [m.to(product.dtype) for m in b]
        product = add_low_rank(product, low, b, list(adapters), len(layers), scalings[0])
    return product, None if adds_bias or bias is None else bias.to(product.dtype)


def _with_rotation(
    tables: Any, grid: Sequence[int], width: int, device: torch.device
) -> tuple[Any, ...]:
    """Return cos and sin [V, D] of a pipeline, and the Rotation of a grid that has the same angles.

    Without a third entry attention runs diffusers' code: the angles are not those of axes. A GPU's are
    compared once for a grid, since the host waits for it; later ones that differ make the output NaN.
    """
    t, h, w = grid
    fits = all(x.shape == (t * h * w, width) and x.device == device for x in tables)
    if not fits or width % 16 or width > _MOST_WIDTH:
        return tables
    pairs = torch.stack(tables).float().view(2, t, h, w, width // 2, 2)
    time, rows, columns = pairs.split((width // 8, width // 16 * 3, width // 16 * 3), dim=4)
    axes = (time[:, :, :1, :1], rows[:, :1, :, :1], columns[:, :1, :1])
    same = [(axis[..., :1] == x).all() for axis, x in zip(axes, (time, rows, columns), strict=True)]
    is_same = torch.stack(same).all()
    if not torch.compiler.is_compiling():
        key = (*grid, width)
        if is_same.is_cpu or key not in _IS_ROTATION:
            _IS_ROTATION[key] = bool(is_same)  # sync: once for a grid
        if not _IS_ROTATION[key]:
            return tables
    table = torch.cat([axis[..., 0].flatten(1) for axis in axes], 1)
    return *tables, Rotation(table.where(is_same, torch.nan), t, h, w)


def _attention_and_mlp() -> tuple[_Part, _Part]:
    """Return functions in place of a block's attention and MLP: rows [B, S, M], and a bias to add to them."""
    from diffusers.models.activations import GELU
    from diffusers.models.attention import Attention, FeedForward
    from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0

    lora: Any = None
    with contextlib.suppress(ImportError):
        from peft.tuners.lora.layer import Linear as lora

    def attend(
        attention: Any, x: Tensor, num_text: int, rotary: Any, options: Any
    ) -> tuple[Tensor, Tensor | None]:
        norms = [n for n in (attention.norm_q, attention.norm_k) if n is not None]
        width = attention.inner_dim // attention.heads
        is_known = (
            _is_plain(attention, Attention)
            and type(attention.processor) is CogVideoXAttnProcessor2_0
            and all(_is_norm(n) and (n.eps, *n.normalized_shape) == (EPS, width) for n in norms)
            and (rotary is None or len(rotary) == 3)
            and (x.device.type == "cpu" or (width % 16 == 0 and width <= _MOST_WIDTH))
            and not (options or attention.to_out[1].p or len(norms) == 1)
        )
        if not is_known:
            text, video = x.split((num_text, x.shape[1] - num_text), 1)
            rotary = rotary and rotary[:2]
            video, text = attention(video, text, image_rotary_emb=rotary, **(options or {}))
            return torch.cat([text, video], 1), None
        qkv, _ = _product([attention.to_q, attention.to_k, attention.to_v], x, lora, adds_bias=True)
        qkv = qkv.unflatten(-1, (3, attention.heads, width))
        of_query, of_key = [(n.weight, n.bias) for n in norms] or [None, None]
        of_rows = qk_norm_rope3d(qkv, of_query, of_key, rotary and rotary[2], num_text)
        return _product([attention.to_out[0]], flash_attention(*of_rows).flatten(2), lora)

    def feed_forward(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        first, middle, last, *rest = mlp.net
        is_idle = all(_is_plain(m, nn.Dropout) and not m.training * m.p for m in (middle, *rest))
        is_known = _is_plain(mlp, FeedForward) and _is_plain(first, GELU) and is_idle
        if not is_known or first.approximate != "tanh":
            return mlp(x), None
        return _product([last], gelu(*_product([first.proj], x, lora)), lora)

    return attend, feed_forward


@functools.cache
def _subclasses() -> dict[type[nn.Module], type[nn.Module]]:
    from diffusers.models.normalization import CogVideoXLayerNormZero
    from diffusers.models.transformers import cogvideox_transformer_3d as source

    attend, feed_forward = _attention_and_mlp()

    class Block(source.CogVideoXBlock):
        def forward(
            self,
            hidden_states: Tensor,
            encoder_hidden_states: Tensor,
            temb: Tensor,
            image_rotary_emb: Any = None,
            attention_kwargs: dict[str, Any] | None = None,
        ) -> tuple[Tensor, Tensor]:
            text, rotary, zeros = encoder_hidden_states, image_rotary_emb, (self.norm1, self.norm2)
            if not all(_is_plain(z, CogVideoXLayerNormZero) and _is_norm(z.norm) for z in zeros):
                rotary = rotary and rotary[:2]
                return super().forward(hidden_states, text, temb, rotary, attention_kwargs)
            first, second = self.norm1.norm, self.norm2.norm
            num_text, num_video = text.shape[1], hidden_states.shape[1]
            hidden = torch.cat([text, hidden_states], 1)  # [B, S, M]
            vectors = (z.linear(z.silu(temb)).expand(len(hidden), -1) for z in zeros)
            # Shift, scale and gate [B, 2, M] of both halves, video before text
            halves = [v.unflatten(-1, (2, 3, -1)).unbind(2) for v in vectors]
            (shift, scale, gate), (shift_2, scale_2, gate_2) = halves
            hidden, x = norm.adaptive_layernorm(
                hidden, first.weight, first.bias, shift, scale, num_text, first.eps
            )
            x, bias = attend(self.attn1, x, num_text, rotary, attention_kwargs)
            affine = (second.weight, second.bias)
            hidden, x = norm.residual_adaptive_layernorm(
                hidden, x, bias, gate, *affine, shift_2, scale_2, num_text, second.eps
            )
            x, bias = feed_forward(self.ff, x)
            hidden = norm.gated_residual(hidden, x, bias, gate_2, num_text)
            text, video = hidden.split((num_text, num_video), 1)
            return video, text

    class Transformer(source.CogVideoXTransformer3DModel):
        @functools.wraps(source.CogVideoXTransformer3DModel.forward)
        def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            tables, config = named.get("image_rotary_emb"), cast(Any, self.config)
            if tables is not None:
                patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
                sizes = (hidden_states.shape[1], *hidden_states.shape[3:])  # frames, height, width
                grid = tuple(-(-size // p) for size, p in zip(sizes, patch, strict=True))
                width, device = config.attention_head_dim, hidden_states.device
                named["image_rotary_emb"] = _with_rotation(tables, grid, width, device)
            return super().forward(hidden_states, *arguments, **named)

    made = {source.CogVideoXTransformer3DModel: Transformer, source.CogVideoXBlock: Block}
    for kind, ours in made.items():
        # Configurations, FSDP and PEFT know classes by their names.
        ours.__name__, ours.__qualname__ = kind.__name__, kind.__qualname__
        ours.__module__ = kind.__module__
    return made


def _set_classes(transformer: Any, function: str, is_applied: bool) -> None:
    made = _subclasses()
    kind, block_kind = made
    model = transformer.get_base_model() if hasattr(transformer, "get_base_model") else transformer
    blocks = getattr(model, "transformer_blocks", ())
    found = [(model, kind), *((block, block_kind) for block in blocks)]
    for module, kind in found:
        if type(module) not in (kind, made[kind]):
            text = f"{function}: {type(module).__name__} is not diffusers' {kind.__name__}"
            text += "; pass a CogVideoXTransformer3DModel or a PeftModel of one"
            raise ValueError(f"{text}, before DDP, FSDP or torch.compile wrap it")
    for module, kind in found:
        module.__class__ = made[kind] if is_applied else kind


def apply_to_diffusers(transformer: nn.Module) -> None:
    """Let diffusers' CogVideoXTransformer3DModel, or a PeftModel of one, run cogfast's kernels.

    ValueError for other classes and for models that DDP, FSDP or torch.compile have wrapped. A second call
    changes nothing; adapters may be added before and after.
    """
    _set_classes(transformer, "apply_to_diffusers", True)


def restore(transformer: nn.Module) -> None:
    """Undo apply_to_diffusers."""
    _set_classes(transformer, "restore", False)
