"""LoRA files: one file with `to_q.lora_A.weight` and so on (PEFT, diffusers, finetrainers), or with
`lora_unet__..._to_q.lora_down.weight` and `.alpha` (kohya's names, which VideoX-Fun has).

diffusers' pipelines read the strength, alpha / r, from the file's header (`lora_adapter_metadata`),
PEFT reads it from adapter_config.json. Many loaders read neither and take strength 1: cogfast's files
therefore have alpha = r, and the strength is a factor of matrix B. Kohya's files store alpha as tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from cogfast.core.json_files import Range, brief, check, parse_json, read_json
from cogfast.core.values import counted, show
from cogfast.extensions.formats.foreign import refuse_foreign
from cogfast.model.lora import FILE_NAME, is_lora_parameter
from cogfast.model.weights.diffusers import plain_name
from cogfast.model.weights.names import LINEARS, diffusers_names
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from cogfast.model.weights.tensor_files import Outgoing, new_folder, open_tensors, write_safetensors

_PEFT_FILE_NAME, _PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_HEADER_KEYS = ("lora_adapter_metadata", "lora_config")  # of diffusers, and of finetrainers
_MEMBER_KEY = "cogfast_model"  # the model that the adapters were trained on
_COMPONENT = "transformer."  # prefix of every name: the pipeline's component
_KOHYA, _KOHYA_PREFIXES = "lora_unet__", re.compile(r"lora_(unet|transformer)_+")
_T = TypeVar("_T")
_LEAST, _MOST = 1e-6, 1e6
_Alpha = Annotated[float, Range(_LEAST, _MOST)]
_Rank = Annotated[int, Range(1, 2**16)]
_NAME = re.compile(r"[\w.]{1,200}")
_NO_ALPHA = (
    " (stores no alpha: strength 1; change it with cogfast convert --to peft --lora-alpha X)"
)
# PEFT's names, with or without an adapter's name, kohya's, and diffusers' of 2023.
_KEY = re.compile(
    r"(?P<module>.+?)[._]lora[._](?P<side>A|B|down|up)(\.(?!weight)[^.]+)?\.weight"
    r"|(?P<scaled>.+)\.alpha"
)
_SIDES = {"A": "A", "B": "B", "down": "A", "up": "B"}
PAIR = re.compile(r"(?P<module>.+)\.matrix_(?P<side>[AB])\.(?P<part>\d+)")


def _linear_of(our_name: str) -> str:
    """Return diffusers' linear of `<linear>.matrix_A.<part>`, or matrix_B."""
    module, _, part = our_name.rsplit(".", 2)
    return diffusers_names(module)[int(part)]


def peft_name(our_name: str) -> str:
    """Return the key of a matrix in a pipeline's LoRA file."""
    return f"{_COMPONENT}{_linear_of(our_name)}.lora_{our_name.rsplit('.', 2)[1][-1]}.weight"


def open_peft(path: str | Path) -> WeightSource:
    """Open the adapters in a LoRA file, or in the only one of a folder.

    If a pair's alpha differs from the most common one, its matrix B is rescaled, so that
    lora_alpha / rank is the strength of all pairs. ValueError for files of other methods, incomplete
    pairs, and files that cannot be read.
    """
    file = _find(Path(path))
    files = open_tensors(file)
    keys = files.names()
    found = _Keys.of(keys, file)
    if not found.ours:
        if not any("lora" in key for key in keys):
            refuse_foreign(file)
        text = f"{file}: none of {counted(len(keys), 'tensor')} is a LoRA tensor of diffusers' "
        text += f"CogVideoXTransformer3DModel, first {brief(next(iter(keys), 'none'))}"
        raise ValueError(f"{text}; use a LoRA file of CogVideoX")
    # DoRA's pairs give wrong weights without its magnitudes.
    if dora := [key for key in found.unexpected if "magnitude" in key or "dora_scale" in key]:
        text = f"{file}: {brief(dora[0])} is DoRA's, but cogfast reads only LoRA"
        raise ValueError(f"{text}; merge it into its base with the tool that made it")
    # A pair of a convolution, such as 1.0's patch embedding: [r, C, h, w] and [M, r, 1, 1].
    theirs = {name: files.shape(key) for name, key in found.ours.items()}
    shapes = {n: (s[0], math.prod(s[1:])) if len(s) == 4 else s for n, s in theirs.items()}
    check_pairs(str(file), shapes)
    where, settings = _settings(file, files.metadata)
    if settings is not None:
        _check_settings(where, settings, found, shapes)
    strengths = {}
    for name in sorted(shapes):
        if ".matrix_B." in name:
            module, rank = _linear_of(name), shapes[name][1]
            key = found.alphas.get(module)
            given = None if key is None else _read_alpha(file, key, files.read(key))
            strengths[name] = _alpha(module, rank, settings) if given is None else given
    # One alpha for the whole source; the few pairs with another are rescaled in `read`.
    alpha = Counter(strengths.values()).most_common(1)[0][0]

    def read(name: str, shard: Shard | None) -> Tensor:
        whole = files.read(found.ours[name]).reshape(shapes[name])
        if strengths.get(name, alpha) != alpha:
            whole = (whole.float() * (strengths[name] / alpha)).to(whole.dtype)
        return whole if shard is None else shard.of(whole)

    return WeightSource(
        description=f"PEFT LoRA {file}" + _NO_ALPHA * (settings is None and not found.alphas),
        shapes=shapes,
        read=read,
        dtypes={name: files.dtype(key) for name, key in found.ours.items()},
        unexpected=found.unexpected,
        is_partial=True,
        convolutions={name: shape for name, shape in theirs.items() if len(shape) == 4},
        lora_alpha=alpha,
        member=brief(files.metadata[_MEMBER_KEY]) if _MEMBER_KEY in files.metadata else None,
    )


def _read_alpha(file: Path, key: str, values: Tensor) -> float:
    alpha = float(values) if values.numel() == 1 else math.nan  # sync: none, on the CPU
    if not _LEAST <= alpha <= _MOST:
        text = f"{file}: {brief(key)} has {values.numel()} numbers, the first {values.view(-1)[:1].tolist()}"
        raise ValueError(f"{text}, instead of one from {_LEAST:g} to {_MOST:g}; copy it again")
    return alpha


def write_peft(
    source: WeightSource, folder: str | Path, dtype: torch.dtype | None = None, to: str = "peft"
) -> Path:
    """Write the adapters of `source` into a new folder, as a file for `pipe.load_lora_weights`, or for
    VideoX-Fun (to: "fun").

    Other tensors are left out. dtype: of the file; None: the source's.
    """
    tensors, header = (kohya_tensors if to == "fun" else peft_tensors)(source, dtype)
    with new_folder(Path(folder), sum(tensor.nbytes for tensor in tensors)) as incomplete:
        write_safetensors(incomplete / FILE_NAME, tensors, header)
    return Path(folder) / FILE_NAME


def with_strength_in_b(source: WeightSource, alpha: float | None = None) -> WeightSource:
    """Return `source` with each matrix B times the rest of its strength, in float32, if pairs have this alpha; None:
    their rank, so that alpha / r is the factor."""

    def read(name: str, shard: Shard | None) -> Tensor:
        values = source.read(name, shard)
        if ".matrix_B." not in name:
            return values
        new = source.shapes[name][1] if alpha is None else alpha
        return values if source.alpha == new else values.float() * (source.alpha / new)

    return replace(source, read=read)


def peft_tensors(
    source: WeightSource, dtype: torch.dtype | None = None
) -> tuple[list[Outgoing], dict[str, str]]:
    """Return the tensors and the header of a LoRA file; see write_peft."""
    names = [name for name in source.shapes if is_lora_parameter(name)]
    read = with_strength_in_b(source).read
    tensors = [
        Outgoing(peft_name(n), shape, dtype or source.dtypes[n], partial(read, n, None))
        for n in names
        for shape in [source.convolutions.get(n, source.shapes[n])]  # the values' order is the same
    ]
    header = json.dumps(_header(source.shapes, names))
    return tensors, _member_header(source) | {_HEADER_KEYS[0]: header}


def kohya_tensors(
    source: WeightSource, dtype: torch.dtype | None = None
) -> tuple[list[Outgoing], dict[str, str]]:
    """Return the tensors and the header of a LoRA file with kohya's names, as VideoX-Fun writes and merges
    them: matrices as they are, and alpha as a tensor for each linear."""
    tensors = []
    for name in filter(is_lora_parameter, source.shapes):
        theirs = _KOHYA + _kohya(_linear_of(name))
        side = "down" if ".matrix_A." in name else "up"
        kind = dtype or source.dtypes[name]
        read = partial(source.read, name, None)
        tensors.append(Outgoing(f"{theirs}.lora_{side}.weight", source.shapes[name], kind, read))
        if side == "down":
            alpha = partial(torch.tensor, source.alpha)
            tensors.append(Outgoing(f"{theirs}.alpha", (), torch.float32, alpha))
    return tensors, _member_header(source)


def _member_header(source: WeightSource) -> dict[str, str]:
    return {} if source.member is None else {_MEMBER_KEY: source.member}


def _header(shapes: Mapping[str, tuple[int, ...]], names: list[str]) -> dict[str, Any]:
    """Return the arguments of peft.LoraConfig for adapters whose alpha is their rank."""
    ranks = {_linear_of(name): shapes[name][0] for name in names if ".matrix_A." in name}
    # PEFT has one `r` and one alpha; patterns name every linear with another rank. The most common
    # one keeps them short. PEFT would also match the end of a longer name, so ^ anchors it.
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{module}": r for module, r in ranks.items() if r != rank}
    config = {"r": rank, "lora_alpha": rank, "target_modules": sorted(ranks)}
    config |= {"rank_pattern": others, "alpha_pattern": others}
    return {_COMPONENT + key: value for key, value in config.items()}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a LoRA file. ours: {cogfast's name: key}; alphas: {diffusers' linear: key}; unexpected:
    unknown keys."""

    ours: dict[str, str] = field(default_factory=dict)
    alphas: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, keys: Sequence[str], file: Path) -> _Keys:
        found, parts = cls(), _parts(keys)
        modules = {name: module for module in parts for name in (module, _kohya(module))}
        for key in keys:
            match = _KEY.fullmatch(key)
            named = match and (match["module"] or match["scaled"])
            module = modules.get(_plain_module(named)) if named else None
            if match is None or module is None:
                found.unexpected.append(key)
            elif match["scaled"]:
                found.alphas[module] = key
            else:
                ours, part = parts[module]
                name = f"{ours}.matrix_{_SIDES[match['side']]}.{part}"
                if name in found.ours:
                    text = f"{file}: {brief(found.ours[name])} and {brief(key)} belong to the same linear, so the "
                    raise ValueError(f"{text}file has several adapters; give a file with one")
                found.ours[name] = key
        return found


def _parts(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return {diffusers' linear: (cogfast's linear, index of the part)} of the blocks that names are of,
    and of the linears outside of blocks."""
    found = map(re.compile(r"transformer_blocks[._](\d+)[._]").search, names)
    blocks = {"0", *(match[1] for match in found if match)}
    ours = [name.replace("{i}", i) for name in LINEARS for i in blocks]
    return {theirs: (name, i) for name in ours for i, theirs in enumerate(diffusers_names(name))}


def _plain_module(name: str) -> str:
    """Return diffusers' name of a linear, or kohya's, without what other programs put before it."""
    prefix = _KOHYA_PREFIXES.match(name)
    return plain_name(name) if prefix is None else name[prefix.end() :]


def _kohya(module: str) -> str:
    return module.replace(".", "_")


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    names = (FILE_NAME, _PEFT_FILE_NAME, FILE_NAME.replace(".safetensors", ".bin"))
    for name in names:
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) != 1:
        held = f"has {len(files)} .safetensors files" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {held}, none named {' or '.join(names)}; give the LoRA's file")
    return files[0]


def check_pairs(where: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless every matrix A [r, in] has a B [out, r] and the other way round.

    shapes: by cogfast's names.
    """
    for name in shapes:
        pair = PAIR.fullmatch(name)
        names = [f"{pair['module']}.matrix_{side}.{pair['part']}" for side in "AB"] if pair else []
        a, b = (shapes.get(n, ()) for n in names) if names else ((), ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not all((*a, *b)):
            text = f"{where}: {brief(name)} has no partner: a pair has shapes [r, in] and [out, r]"
            text += f", not {brief(str(list(a)))} and {brief(str(list(b)))}; copy it again"
            raise ValueError(text)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of peft.LoraConfig that decide strengths, with its defaults, and those that the
    tensors must agree with."""

    peft_type: Literal["LORA"] | None = "LORA"
    lora_alpha: _Alpha = 8.0
    alpha_pattern: dict[str, _Alpha] | None = None
    use_rslora: bool | None = False
    r: _Rank | None = None
    rank_pattern: dict[str, _Rank] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    modules_to_save: list[str] | None = None
    bias: str | None = None
    use_dora: bool | None = False


def _settings(file: Path, header: Mapping[str, str]) -> tuple[str, _Settings | None]:
    """Return the name and content of PEFT's settings in the header, else in adapter_config.json; None
    if there are none."""
    if (key := next((key for key in _HEADER_KEYS if key in header), None)) is not None:
        where = f"{file}: {key}"
        found = parse_json(header[key], dict[str, Any], where)
        # diffusers prefixes its keys by the pipeline's component; other tools may not.
        prefixed = {k: v for k, v in found.items() if k.startswith(_COMPONENT)}
        found = {key.removeprefix(_COMPONENT): value for key, value in (prefixed or found).items()}
        return where, check(found, _Settings, where)
    where = str(file.parent / _PEFT_SETTINGS)
    return where, read_json(where, _Settings) if Path(where).is_file() else None


def _alpha(module: str, rank: int, settings: _Settings | None) -> float:
    """Return the alpha for which alpha / rank is the strength of a linear's pair."""
    if settings is None:
        # Strength 1, as in diffusers.
        return float(rank)
    alpha = _of_module(module, settings.alpha_pattern, settings.lora_alpha)
    return alpha * math.sqrt(rank) if settings.use_rslora else alpha


def _of_module(module: str, patterns: Mapping[str, _T] | None, default: _T) -> _T:
    """Return the value of the first name in PEFT's rank_pattern or alpha_pattern that is a linear's,
    or the end of it."""
    for name, special in (patterns or {}).items():
        if module == name.removeprefix("^") or f".{module}".endswith(f".{name}"):
            return special
    return default


def _check_settings(
    where: str, settings: _Settings, found: _Keys, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError if the file does not have the tensors that its settings describe, or has other
    tensors than those of LoRA's pairs."""
    wrong = [
        # A regular expression could take exponential time.
        f"a pattern {brief(name)!r}, which must be the name of a linear or its end"
        for name in (*(settings.rank_pattern or ()), *(settings.alpha_pattern or ()))
        if not _NAME.fullmatch(name.removeprefix("^"))
    ]
    for key in ("use_dora", "modules_to_save", "bias"):
        value = getattr(settings, key)
        if value and value != "none":
            wrong.append(f"{key}={brief(show(value))}, but cogfast reads LoRA's pairs only")
    linears = {name: _linear_of(name) for name in found.ours}
    for name, module in linears.items():
        rank = _of_module(module, settings.rank_pattern, settings.r)
        if ".matrix_A." in name and rank not in (None, shapes[name][0]):
            wrong.append(f"r={rank} for {module}, whose matrices have rank {shapes[name][0]}")
    targets, held = settings.target_modules, {*linears.values()}
    leaves_out = settings.exclude_modules or settings.layers_to_transform is not None
    if isinstance(targets, list) and not leaves_out:  # a text is a pattern
        ends = tuple(f".{name}" for name in targets)
        for module in _parts([*held, *targets]):
            # Not all models have the offset's embedding.
            is_wanted = f".{module}".endswith(ends) and not module.startswith("ofs_embedding")
            if is_wanted and module not in held:
                wrong.append(f"target_modules that include {module}, which the file lacks")
    if wrong:
        raise ValueError(f"{where}: has {wrong[0]}; copy the LoRA's files again")
