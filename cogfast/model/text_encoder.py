"""Frozen text encoders: T5 from a folder, and a small random T5 that reads bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cogfast.schema.json_files import InsideName, Range, brief, read_json

logger = logging.getLogger(__name__)

NumTokens = Annotated[int, Range(1, 4096)]
_MOST_WEIGHTS = 2**26  # of ByteTextEncoder

# transformers can build T5's tokenizer from either file.
VOCABULARY_FILES = ("spiece.model", "tokenizer.json")
_Tokenizer = Literal[
    "T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"
]


class TextEncoder(Protocol):
    """A frozen text encoder: what an nn.Module must have to be the emb_models entry of captions.

    A constructor that takes `dtype` gets args.precision's and keeps what must stay in float32;
    another module is converted with `.to(dtype)`. If it takes `max_length`, that must equal the
    model's text_length and is a part of a latent cache's key.
    """

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Call `forward`; nn.Module has this method."""
        ...

    def forward(self, captions: Sequence[str]) -> Tensor:
        """Encode captions [B] to embeddings [B, L, E] on the module's device, in any float dtype.

        L is the model's text_length for every caption, so shorter ones are padded; the model attends
        to all rows. E is the model's text_hidden_size. The same caption must give the same rows in
        any batch, because a latent cache stores them.
        """
        ...


class _PaddedT5(nn.Module):
    """T5's encoder of captions that `tokenizer` pads and truncates to `max_length` tokens."""

    max_length: int
    tokenizer: Any
    transformer: Any
    has_warned_truncation = False

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Captions [B] -> token ids [B, L] int64 on the CPU. Warns once about truncation."""
        batch = self.tokenizer(
            list(captions),
            truncation=True,
            max_length=self.max_length,
            padding="max_length",
            return_tensors="np",
        )
        ids = batch["input_ids"]
        if not self.has_warned_truncation:
            # A caption without padding has max_length tokens or more: only these are counted again.
            is_full = ids[:, -1] != self.tokenizer.pad_token_id
            for caption in (c for c, full in zip(captions, is_full, strict=True) if full):
                num_tokens = len(self.tokenizer(caption)["input_ids"])
                if num_tokens > self.max_length:
                    self.has_warned_truncation = True
                    logger.warning(
                        "captions of more than max_length=%d tokens are truncated, such as this one of "
                        "%d: %s...",
                        self.max_length,
                        num_tokens,
                        caption[:60],
                    )
                    break
        return torch.from_numpy(ids).long()

    @torch.no_grad()
    def forward(self, captions: Sequence[str]) -> Tensor:
        """Captions [B] -> embeddings [B, L, E], padding rows included."""
        ids = self.tokenize(captions).to(self.transformer.device)
        # No attention mask, as in SAT: the video models were trained on rows that see the padding.
        return self.transformer(input_ids=ids).last_hidden_state


class T5TextEncoder(_PaddedT5):
    """T5's encoder as CogVideoX uses it: padded to `max_length`, without an attention mask.

    The arguments are those of SAT's FrozenT5Embedder (sat/sgm/modules/encoders/modules.py), whose
    default `max_length` is 77; every CogVideoX config sets 226. model_dir: a folder written by
    transformers, or one with text_encoder/ and tokenizer/ inside (diffusers), or, with `cache_dir`,
    a hub name that is looked up there. device: None keeps the device that weights load to.
    """

    def __init__(
        self,
        model_dir: str,
        device: str | torch.device | None = None,
        max_length: NumTokens = 77,
        freeze: bool = True,
        cache_dir: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        from transformers import AutoTokenizer, T5EncoderModel

        weights, vocabulary = _find_folders(model_dir, cache_dir)
        self.max_length = max_length
        _check_settings(Path(weights), Path(vocabulary))
        # The folder may have been downloaded: none of its code may run.
        given = {"cache_dir": cache_dir, "trust_remote_code": False}
        self.tokenizer = _read(AutoTokenizer.from_pretrained, vocabulary, **given)
        _check_vocabulary(self.tokenizer, vocabulary)
        self.transformer = _read(T5EncoderModel.from_pretrained, weights, **given, dtype=dtype)
        self.folder = vocabulary
        # A vocabulary of another model fails here and not in the first step.
        self.tokenize(["a video of the sea"])
        self.width: int = self.transformer.config.d_model
        if freeze:
            self.eval().requires_grad_(False)
        if device is not None:
            self.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> T5TextEncoder:
        # T5's last linears overflow in fp16. transformers keeps them in float32; `.to` does not.
        super()._apply(fn, recurse)
        if self.transformer.dtype == torch.float16:
            for name, module in self.transformer.named_modules():
                if name.endswith(".wo"):
                    module.float()
        return self

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Captions [B] -> token ids [B, L] int64 on the CPU."""
        ids = super().tokenize(captions)
        largest, size = int(ids.max()), self.transformer.config.vocab_size
        if largest >= size:
            raise ValueError(
                f"model_dir={self.folder}: its vocabulary has the token {largest}, the encoder has "
                f"{size}; copy both from one T5 download"
            )
        return ids


class ByteTextEncoder(_PaddedT5):
    """A small T5 with random weights that reads bytes; it needs no vocabulary and no download.

    Different captions get different embeddings, which a video model can learn to use. The weights
    are a function of the arguments alone, so that every process builds the same encoder.
    """

    def __init__(
        self,
        max_length: NumTokens = 32,
        d_model: Annotated[int, Range(1, 4096)] = 64,
        d_kv: Annotated[int, Range(1, 256)] = 16,
        d_ff: Annotated[int, Range(1, 16384)] = 256,
        num_layers: Annotated[int, Range(1, 24)] = 2,
        num_heads: Annotated[int, Range(1, 64)] = 4,
        seed: Annotated[int, Range(0, 2**63 - 1)] = 0,
    ) -> None:
        super().__init__()
        from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

        size = num_layers * d_model * (3 * d_ff + 4 * d_kv * num_heads)
        if size > _MOST_WEIGHTS:
            raise ValueError(
                f"ByteTextEncoder of {size} weights: it may have {_MOST_WEIGHTS} at most; use a "
                "smaller d_model, d_ff or num_layers"
            )
        self.max_length = max_length
        self.width = d_model
        self.tokenizer = ByT5Tokenizer()
        config = T5Config(
            vocab_size=len(self.tokenizer),
            d_model=d_model,
            d_kv=d_kv,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
            feed_forward_proj="gated-gelu",
        )
        # transformers draws initial weights from PyTorch's global generator.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            self.transformer = T5EncoderModel(config)
        self.eval().requires_grad_(False)


def _find_folders(model_dir: str, cache_dir: str | None) -> tuple[str, str]:
    """Return the folders of the weights and of the vocabulary; a hub name is returned for both."""
    folder = Path(model_dir)
    if not folder.is_dir():
        if cache_dir is not None:
            return model_dir, model_dir
        raise ValueError(
            f"model_dir={model_dir} is not a folder; give the folder of T5's encoder "
            "(config.json, weights and spiece.model or tokenizer.json)"
        )
    is_pipeline = (folder / "text_encoder").is_dir() and (folder / "tokenizer").is_dir()
    weights = folder / "text_encoder" if is_pipeline else folder
    vocabulary = folder / "tokenizer" if is_pipeline else folder
    if not (weights / "config.json").is_file():
        raise ValueError(
            f"model_dir={model_dir} has no config.json; give the folder of T5's encoder"
        )
    if not any((vocabulary / name).is_file() for name in VOCABULARY_FILES):
        raise ValueError(
            f"model_dir={model_dir} has no vocabulary ({' or '.join(VOCABULARY_FILES)}), so every "
            "word would become <unk>; copy the file from the T5 download into the folder"
        )
    return str(weights), str(vocabulary)


@dataclass(frozen=True, slots=True)
class _T5Config:
    """The keys of config.json that T5's encoder is built from, with transformers' defaults."""

    model_type: Literal["t5", "mt5", "umt5"] = "t5"
    vocab_size: Annotated[int, Range(1, 2**20)] = 32128
    d_model: Annotated[int, Range(1, 2**14)] = 512
    d_kv: Annotated[int, Range(1, 2**12)] = 64
    d_ff: Annotated[int, Range(1, 2**17)] = 2048
    num_layers: Annotated[int, Range(1, 2**8)] = 6
    num_heads: Annotated[int, Range(1, 2**10)] = 8
    relative_attention_num_buckets: Annotated[int, Range(1, 2**12)] = 32
    relative_attention_max_distance: Annotated[int, Range(1, 2**16)] = 128
    layer_norm_epsilon: Annotated[float, Range(1e-12, 1e-2)] = 1e-6
    feed_forward_proj: Literal["relu", "gated-gelu", "gelu", "gated-silu"] = "relu"

    @property
    def num_parameters(self) -> int:
        """A lower bound of the encoder's number of parameters."""
        attention = 4 * self.d_model * self.d_kv * self.num_heads
        return self.num_layers * (attention + 2 * self.d_model * self.d_ff)


@dataclass(frozen=True, slots=True)
class _TokenizerConfig:
    tokenizer_class: _Tokenizer | None = None


def _check_settings(weights: Path, vocabulary: Path) -> None:
    """Raise ValueError if the folder's files name another class or sizes that its weights lack."""
    # transformers builds whatever class and sizes config.json names, before it reads the weights.
    if not weights.is_dir():
        return  # a hub name
    config = read_json(weights / "config.json", _T5Config)
    files = [*weights.glob("*.safetensors"), *weights.glob("*.bin")]
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if config.num_parameters > num_bytes:  # quantized weights have at least one byte each
        raise ValueError(
            f"{weights}: its weights have {num_bytes} bytes, but config.json describes at least "
            f"{config.num_parameters} parameters; copy the folder again"
        )
    for index in weights.glob("*.index.json"):
        read_json(index, {"weight_map": dict[str, InsideName]})
    if (vocabulary / "tokenizer_config.json").exists():
        read_json(vocabulary / "tokenizer_config.json", _TokenizerConfig)


def _read(load: Callable[..., Any], folder: str, **given: Any) -> Any:
    """Call transformers' loader and turn its errors about damaged files into one ValueError."""
    try:
        return load(folder, **given)
    except Exception as error:  # the loaders of its file formats raise errors of many types
        reason = brief(str(error).strip().partition("\n")[0] or type(error).__name__)
        raise ValueError(
            f"model_dir={folder}: transformers cannot read it ({reason}); copy the folder again"
        ) from None


def _check_vocabulary(tokenizer, folder: str) -> None:
    """Raise ValueError for a vocabulary in which plain words are unknown."""
    ids = tokenizer("a video of the sea", add_special_tokens=False)["input_ids"]
    if not ids or tokenizer.unk_token_id in ids:
        raise ValueError(
            f"model_dir={folder}: its vocabulary lacks plain English words, which become "
            "<unk>; copy spiece.model or tokenizer.json from the T5 download into the folder"
        )
