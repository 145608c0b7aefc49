"""Frozen text encoders: T5 from a folder, and a small random T5 that reads bytes."""

from __future__ import annotations

import logging
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.core.json_files import brief, read_json
from cogfast.core.values import Range
from cogfast.model.weights.source import load_state
from cogfast.model.weights.tensor_files import SafetensorsFiles, TorchFiles

logger = logging.getLogger(__name__)

NumTokens = Annotated[int, Range(1, 4096)]
_MOST_WEIGHTS = 2**26  # of ByteTextEncoder
# T5's relative positions: buckets of distances, and the distance from which on all share the last one.
_NUM_BUCKETS, _MOST_DISTANT = 32, 128
_NORM_EPS = 1e-6

# transformers can build T5's tokenizer from either file.
VOCABULARY_FILES = ("spiece.model", "tokenizer.json")
# The tokens that T5's tokenizers have beside their vocabulary; mT5's extra ids begin with a space.
_ADDED_TOKEN = re.compile(r"<pad>|</s>|<unk>|▁?<extra_id_\d{1,3}>")
_AGAIN = "copy the folder again"
_TABLES = ("shared.weight", "encoder.embed_tokens.weight")
_PADDING_ID, _END = 0, 1  # of T5's tokens and of ByT5's
# ByT5: three special tokens, the 256 bytes, 125 tokens that nothing uses
_FIRST_BYTE, _NUM_IDS = 3, 384
_Class = Literal["T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"]


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
    """T5's encoder of captions, which are padded and truncated to `max_length` tokens."""

    max_length: int
    has_warned_truncation = False

    @abstractmethod
    def _token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each caption, all of them, with the end."""

    @abstractmethod
    def _embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, L] -> embeddings [B, L, E]."""

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Captions [B] -> token ids [B, L] int64 on the CPU. Warns once about truncation."""
        ids = torch.full((len(captions), self.max_length), _PADDING_ID)
        for row, caption, tokens in zip(ids, captions, self._token_ids(captions), strict=True):
            if len(tokens) > self.max_length and not self.has_warned_truncation:
                self.has_warned_truncation = True
                logger.warning(
                    "captions of more than max_length=%d tokens are truncated, such as this one of %d: "
                    "%s...",
                    self.max_length,
                    len(tokens),
                    caption[:60],
                )
            # A truncated caption ends, too.
            tokens = [*tokens[: min(len(tokens), self.max_length) - 1], _END]
            row[: len(tokens)] = torch.tensor(tokens)
        return ids

    @torch.no_grad()
    def forward(self, captions: Sequence[str]) -> Tensor:
        """Captions [B] -> embeddings [B, L, E], padding rows included."""
        # No attention mask, as in SAT: the video models were trained on rows that see the padding.
        return self._embed(self.tokenize(captions).to(next(self.parameters()).device))


class T5TextEncoder(_PaddedT5):
    """T5's encoder as CogVideoX uses it: padded to `max_length`, without an attention mask.

    The arguments are those of SAT's FrozenT5Embedder (sat/sgm/modules/encoders/modules.py), whose
    default `max_length` is 77; every CogVideoX config sets 226. device: None keeps the device that
    weights load to.
    """

    def __init__(
        self,
        # folder of T5: one that transformers wrote, or one with text_encoder/ and tokenizer/ (diffusers)
        model_dir: str,
        device: str | torch.device | None = None,
        # tokens of a caption: 226; longer captions are cut
        max_length: NumTokens = 77,
        # only true
        freeze: bool = True,
        # folder of downloaded models in which model_dir is looked up as a hub name; nothing is downloaded
        cache_dir: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        weights, vocabulary = _find_folders(model_dir, cache_dir)
        self.max_length = max_length
        config = read_json(weights / "config.json", _T5Config)
        if (vocabulary / "tokenizer_config.json").exists():
            read_json(vocabulary / "tokenizer_config.json", _TokenizerConfig)
        self.tokenizer = _read_tokenizer(vocabulary)
        _check_vocabulary(self.tokenizer, vocabulary)
        with torch.device("meta"):
            self.transformer = T5EncoderModel(T5Config(**asdict(config)))
        state = _read_weights(weights)
        kept = ".wo.weight" if dtype == torch.float16 else None
        load_state(self.transformer, state, f"model_dir={weights}", _AGAIN, dtype, kept)
        self.transformer.tie_weights()
        self.folder = vocabulary
        # A vocabulary of another model fails here and not in the first step.
        self.has_warned_truncation = True
        self.tokenize(["a video of the sea"])
        self.has_warned_truncation = False
        self.width: int = self.transformer.config.d_model
        if freeze:
            self.eval().requires_grad_(False)
        if device is not None:
            self.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> T5TextEncoder:
        # T5's last linears overflow in fp16, and `.to` converts all weights.
        super()._apply(fn, recurse)
        if self.transformer.dtype == torch.float16:
            for name, module in self.transformer.named_modules():
                if name.endswith(".wo"):
                    module.float()
        return self

    def _token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        with _panics_as_errors(self.folder):
            # verbose: its warning about long captions would repeat ours.
            return self.tokenizer(list(captions), verbose=False)["input_ids"]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.transformer(input_ids=ids)[0]  # a tuple if config.json has return_dict: false

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        ids = super().tokenize(captions)
        largest, size = int(ids.max()), self.transformer.config.vocab_size
        if largest >= size:
            text = f"model_dir={self.folder}: its vocabulary has the token {largest}, the encoder has {size}"
            raise ValueError(f"{text}; copy both from one T5 download")
        return ids


class ByteTextEncoder(_PaddedT5):
    """A small T5 with random weights that reads bytes; it needs no vocabulary and no download.

    Different captions get different embeddings, which a video model can learn to use. The weights
    are a function of the arguments alone, so that every process builds the same encoder.
    """

    def __init__(
        self,
        # tokens of a caption, a byte each
        max_length: NumTokens = 32,
        # width of the embedding
        d_model: Annotated[int, Range(1, 4096)] = 64,
        # width of a head
        d_kv: Annotated[int, Range(1, 256)] = 16,
        # width inside the feed-forward layers
        d_ff: Annotated[int, Range(1, 16384)] = 256,
        # number of layers
        num_layers: Annotated[int, Range(1, 24)] = 2,
        # attention heads per layer
        num_heads: Annotated[int, Range(1, 64)] = 4,
        # decides the random weights
        seed: Annotated[int, Range(0, 2**63 - 1)] = 0,
    ) -> None:
        super().__init__()
        size = num_layers * d_model * (3 * d_ff + 4 * d_kv * num_heads)
        if size > _MOST_WEIGHTS:
            text = f"ByteTextEncoder of {size} weights: it may have {_MOST_WEIGHTS} at most"
            raise ValueError(f"{text}; use a smaller d_model, d_ff or num_layers")
        self.max_length, self.width = max_length, d_model
        # PyTorch's layers draw their first weights from its global generator.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            self.transformer = _ByteT5(d_model, d_kv, d_ff, num_layers, num_heads)
        self.eval().requires_grad_(False)

    def _token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        return [[*(b + _FIRST_BYTE for b in caption.encode()), _END] for caption in captions]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.transformer(ids)


class _ByteT5(nn.Module):
    """T5's encoder with random weights, bit for bit the T5EncoderModel of transformers.

    Importing transformers' T5 takes 2 s of CPU time, a third of a start.
    """

    def __init__(self, d_model: int, d_kv: int, d_ff: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_IDS, d_model)
        nn.Embedding(_NUM_IDS, d_model)  # transformers draws this table for two modules
        blocks = [_T5Block(d_model, d_kv, d_ff, num_heads, i == 0) for i in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = _T5Norm(d_model)
        # Draw as often as transformers does and in its order; each weight's last draw counts.
        nn.init.normal_(self.embedding.weight)
        for block in blocks:
            block.draw_weights()
        for _ in range(2):
            nn.init.normal_(self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, L] -> embeddings [B, L, E]."""
        hidden = self.embedding(ids)
        first = self.blocks[0]
        assert isinstance(first, _T5Block)
        bias = first.position_bias(ids.shape[1])
        for block in self.blocks:
            hidden = block(hidden, bias)
        return self.norm(hidden)


class _T5Block(nn.Module):
    """Attention and a gated MLP, each after a norm and with a residual connection."""

    def __init__(
        self, d_model: int, d_kv: int, d_ff: int, num_heads: int, has_position_bias: bool
    ) -> None:
        super().__init__()
        self.d_kv = d_kv
        self.q, self.k, self.v = (nn.Linear(d_model, d_kv * num_heads, bias=False) for _ in "qkv")
        self.o = nn.Linear(d_kv * num_heads, d_model, bias=False)
        # All blocks use the first one's.
        self.buckets = nn.Embedding(_NUM_BUCKETS, num_heads) if has_position_bias else None
        self.wi_0, self.wi_1 = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.attention_norm, self.mlp_norm = _T5Norm(d_model), _T5Norm(d_model)

    def draw_weights(self) -> None:
        # {layer: the number of which its standard deviation is the inverse root}
        width = self.q.in_features
        attention: dict[nn.Linear | nn.Embedding, int] = {
            self.q: width * self.d_kv,
            self.k: width,
            self.v: width,
        }
        attention[self.o] = self.o.in_features
        if self.buckets is not None:
            attention[self.buckets] = width
        for layers in (
            attention,
            {self.wi_0: width, self.wi_1: width, self.wo: self.wo.in_features},
        ):
            for layer in layers:
                nn.init.normal_(layer.weight)
            for layer, number in layers.items():
                nn.init.normal_(layer.weight, std=number**-0.5)

    def position_bias(self, num_tokens: int) -> Tensor:
        """Return the learned bias of each distance between tokens: [1, H, L, L]."""
        assert self.buckets is not None, "the first block has it"
        at = torch.arange(num_tokens, device=self.buckets.weight.device)
        offset = at[None, :] - at[:, None]
        half = _NUM_BUCKETS // 2  # for keys before the query, and as many for keys after it
        near = half // 2  # distances that have a bucket each; the others share buckets by logarithm
        distance = offset.abs()
        octaves = torch.log(distance.float() / near) / math.log(_MOST_DISTANT / near)
        far = near + (octaves * (half - near)).long()
        bucket = torch.where(distance < near, distance, far.clamp(max=half - 1))
        return self.buckets(bucket + (offset > 0) * half).permute(2, 0, 1)[None].contiguous()

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        x = self.attention_norm(hidden)
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.d_kv)).transpose(1, 2)  # [B, H, L, D]
            for linear in (self.q, self.k, self.v)
        )
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        hidden = hidden + self.o(x.transpose(1, 2).flatten(2))
        x = self.mlp_norm(hidden)
        return hidden + self.wo(_gelu(self.wi_0(x)) * self.wi_1(x))


def _gelu(x: Tensor) -> Tensor:
    """GELU's tanh approximation as transformers computes it; F.gelu rounds differently."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class _T5Norm(nn.Module):
    """RMS norm whose statistics are in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + _NORM_EPS)).to(self.weight.dtype)


def _find_folders(model_dir: str, cache_dir: str | None) -> tuple[Path, Path]:
    """Return the folders of the weights and of the vocabulary. cache_dir: see T5TextEncoder."""
    folder = Path(model_dir)
    if not folder.is_dir() and cache_dir is not None:
        folder = _cached_folder(model_dir, cache_dir)
    if not folder.is_dir():
        text = f"model_dir={model_dir} is not a folder; give the folder of T5's encoder (config.json, weights and "
        raise ValueError(f"{text}spiece.model or tokenizer.json)")
    is_pipeline = (folder / "text_encoder").is_dir() and (folder / "tokenizer").is_dir()
    weights = folder / "text_encoder" if is_pipeline else folder
    vocabulary = folder / "tokenizer" if is_pipeline else folder
    if not (weights / "config.json").is_file():
        text = f"model_dir={model_dir} has no config.json; give the folder of T5's encoder"
        raise ValueError(text)
    if not any((vocabulary / name).is_file() for name in VOCABULARY_FILES):
        text = f"model_dir={model_dir} has no vocabulary ({' or '.join(VOCABULARY_FILES)}), so every word would "
        raise ValueError(f"{text}become <unk>; copy the file from the T5 download into the folder")
    return weights, vocabulary


def _cached_folder(name: str, cache_dir: str) -> Path:
    """Return the folder of the model `name` in a cache of the hub's client, without a download."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", cache_dir)
    except HFValidationError:
        config = None
    if not isinstance(config, str):
        text = f"model_dir={name} is neither a folder nor a model in cache_dir={cache_dir}; give the folder of "
        raise ValueError(f"{text}T5's encoder, or run hf download {name} --cache-dir {cache_dir}")
    return Path(config).parent


@dataclass(frozen=True, slots=True)
class _T5Config:
    """The keys of config.json that T5's encoder is built from, with transformers' defaults."""

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


@dataclass(frozen=True, slots=True)
class _TokenizerConfig:
    tokenizer_class: _Class | None = None
    extra_ids: Annotated[int, Range(0, 100)] = 100


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read T5's encoder, in safetensors or PyTorch files, without a whole T5's decoder and last layer."""
    single = folder / "model.safetensors"
    if single.is_file() or (folder / "model.safetensors.index.json").is_file():
        # transformers takes the single file if there is an index, too.
        files = SafetensorsFiles(single if single.is_file() else folder)
    else:
        files = TorchFiles(folder)
    state = {name: files.read(name) for name in files.names()}
    state = {k: v for k, v in state.items() if not k.startswith(("decoder.", "lm_head."))}
    # One table has two names; files may have either.
    for name, other in (_TABLES, _TABLES[::-1]):
        if other in state:
            state.setdefault(name, state[other])
    return state


@contextmanager
def _panics_as_errors(folder: Path) -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        text = f"model_dir={folder}: the tokenizer's vocabulary is damaged ({brief(str(error))})"
        raise ValueError(f"{text}; copy the folder again") from None


def _read_tokenizer(folder: Path) -> Any:
    """Load a tokenizer. ValueError for damaged files."""
    from transformers import AutoTokenizer

    with _panics_as_errors(folder):
        try:
            # The folder may have been downloaded: none of its code may run.
            return AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the loaders of its file formats raise errors of many types
            reason = brief(str(error).strip().partition("\n")[0] or type(error).__name__)
            text = f"model_dir={folder}: transformers cannot read its tokenizer ({reason})"
            raise ValueError(f"{text}; {_AGAIN}") from None


def _check_vocabulary(tokenizer, folder: Path) -> None:
    """Raise ValueError for a vocabulary in which plain words are unknown, and for a tokenizer with
    other tokens beside them than T5's."""
    with _panics_as_errors(folder):
        ids = tokenizer("a video of the sea", add_special_tokens=False)["input_ids"]
        ended = tokenizer("a video of the sea")["input_ids"]
    if not ids or tokenizer.unk_token_id in ids:
        text = f"model_dir={folder}: its vocabulary lacks plain English words, which become <unk>"
        text += "; copy spiece.model or tokenizer.json from the T5 download into the folder"
        raise ValueError(text)
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    odd = [token for token in added if not _ADDED_TOKEN.fullmatch(token)]
    if odd or ended != [*ids, _END]:
        of_text = f"{ended} for a caption of {ids}"
        wrong = f"added tokens such as {brief(odd[0])!r}" if odd else of_text
        text = f"model_dir={folder}: its tokenizer has {wrong}; T5's appends </s> = {_END}"
        raise ValueError(f"{text}; copy the tokenizer's files of the T5 download again")
