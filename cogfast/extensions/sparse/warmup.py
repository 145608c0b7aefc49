"""Lets the share that block-sparse attention leaves out grow over the first steps."""

from __future__ import annotations

from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.watchers.watcher import Watcher


class SparseWarmup(Watcher):
    """Sets the share before each step: of step i of `steps`, share * i / steps. Step 0 is dense."""

    def __init__(self, transformer: DiffusionTransformer, steps: int) -> None:
        assert transformer.sparse_share is not None, "args.sparse_warmup without sparse attention"
        self.transformer, self.steps, self.share = transformer, steps, transformer.sparse_share

    def before_step(self, step: int) -> None:
        self.is_done = step >= self.steps
        self.transformer.use_sparse_attention(self.share * min(1.0, step / self.steps))
