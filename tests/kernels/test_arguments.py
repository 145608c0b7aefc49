"""Arguments that do not fit are refused by name."""

import json
import re
from functools import partial
from pathlib import Path

import torch

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels.add_low_rank import add_low_rank
from cogfast.kernels.attention_backends import flash_attention
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import Rotation, qk_norm_rope3d
from tests.support.refusals import Refusal, assert_refused, refusals

ROWS = "hidden=[2,5,16]"
BRANCH = "branch=[2,5,16] branch_bias=[16] gate=[2,2,16]"
NORM = "weight=[16] bias=[16] shift=[2,2,16] scale=[2,2,16] eps=1e-5"
# {op: (function, arguments that it takes)}
OPS = {
    "residual_adaptive_layernorm": (
        norm.residual_adaptive_layernorm,
        f"{ROWS} {BRANCH} {NORM} num_text=1",
    ),
    "adaptive_layernorm": (norm.adaptive_layernorm, f"{ROWS} {NORM} num_text=1"),
    "gated_residual": (norm.gated_residual, f"{ROWS} {BRANCH} num_text=1"),
    "gelu": (gelu, "x=[2,4] bias=[4]"),
    "add_low_rank": (
        partial(add_low_rank, parts=[0, 2], num_parts=3),
        "x=[1,65,192] low=[1,65,66] matrices=[[64,33],[64,33]]",
    ),
    "qk_norm_rope3d": (
        qk_norm_rope3d,
        "qkv=[2,8,3,2,16] query_norm=[[16],[16]] key_norm=[[16],[16]] rotation=[2,17] num_text=2",
    ),
    "flash_attention": (flash_attention, "q=[1,4,2,8] k=[1,4,2,8] v=[1,4,2,8]"),
    "FusedEmaAdam": (partial(FusedEmaAdam, [torch.zeros(1, requires_grad=True)]), "ema_decay=0.9"),
}


def made(value: object, kind: str) -> object:
    """Return zeros for a shape, a list for a list of shapes, and any other value as it is."""
    if not isinstance(value, list) or any(isinstance(item, float) for item in value):
        return value
    if not all(isinstance(item, int) for item in value):
        return [made(item, kind) for item in value]
    if kind == "meta":
        return torch.zeros(value, device="meta")
    return torch.zeros(value).t() if kind == "T" else torch.zeros(value, dtype=getattr(torch, kind))


def arguments(words: list[str]) -> dict[str, object]:
    found = {}
    for word in words:
        name, _, text = word.partition("=")
        value, kind = re.fullmatch(r"(.*?)((?<=\])\w+)?", text).groups()
        found[name] = made(json.loads(value), kind or "float32")
        if name == "rotation":
            found[name] = Rotation(found[name], 1, 2, 3)
    return found


@refusals(Path(__file__).with_name("refusals.txt"))
def test_wrong_arguments_are_refused(refusal: Refusal) -> None:
    function, words = OPS[refusal.base]
    given = arguments([*words.split(), *refusal.words])
    assert_refused(lambda: function(**given), refusal.line)
