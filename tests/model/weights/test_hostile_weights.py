"""Damaged and hostile files of weights, of every format: read as they are meant, or refused in one
line; nothing runs, nothing hangs, nothing is written elsewhere."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from cogfast.__main__ import _COMMANDS, main
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.convert import convert
from cogfast.model.weights.load import load_transformer
from tests.model.test_lora import save_as_sat
from tests.support.hostile import faults, run_case
from tests.support.tiny_transformers import tiny

pytestmark = pytest.mark.forks

NUM_SOAKED = 1000  # of each format
SMALL = {"hidden_size": 64, "num_attention_heads": 1, "num_layers": 1}
# Commands import these when they need them. Here they are imported before the cases are forked.
IMPORTED_LATE = (
    "cogfast.cli.options",
    "cogfast.config",
    "cogfast.schema.merged_config",
    "encodings.cp437",
    "cogfast.train.sampling.pipeline_defaults",
    "cogfast.train.sampling.lora_overlay",
    "cogfast.train.preflight.inferred",
    "cogfast.data.datasets",
    "cogfast.diffusion.loss",
    "cogfast.diffusion.sampler",
    "cogfast.model.text_encoder",
    "transformers",
    "transformers.convert_slow_tokenizer",
    "transformers.integrations.mistral",
    "transformers.models.encoder_decoder",
    "transformers.models.t5.tokenization_t5",
    "omegaconf._impl",
    "omegaconf.vendor.antlr4.LL1Analyzer",
)


@dataclass(frozen=True)
class Format:
    """reads: arguments of commands, or calls, that read the folder `in`; they may write to `out`."""

    make: Callable[[Path], None]
    reads: tuple[tuple[str, ...] | Callable[[], object], ...]


def run(read: tuple[str, ...] | Callable[[], object]) -> int:
    """Run a command as the command line does, with one line for an error."""
    if isinstance(read, tuple):
        return main(list(read))
    with patch.dict(_COMMANDS, {"read": lambda argv: read()}):
        return main(["read"])


def _sat(folder: Path) -> None:
    save_as_sat(tiny("2b", **SMALL).bfloat16(), folder)


def _sat_cut(folder: Path) -> None:
    wide = {**SMALL, "hidden_size": 128, "num_attention_heads": 2}
    save_as_sat(tiny("5b_i2v", **wide).bfloat16(), folder / "whole")
    convert(folder / "whole", folder / "cut", "sat", model_parallel_size=2)
    for path in (folder / "cut").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "cut")
    shutil.rmtree(folder / "whole")


def _from_sat(folder: Path, family: str, to: str, **lora: object) -> None:
    save_as_sat(tiny(family, seed=3, **SMALL, **lora).bfloat16(), folder / "sat")
    convert(folder / "sat", folder / "made", to)
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "made")
    shutil.rmtree(folder / "sat")


def _sharded(folder: Path) -> None:
    from diffusers import CogVideoXTransformer3DModel

    _from_sat(folder / "one", "1.5_5b", "diffusers")
    model = CogVideoXTransformer3DModel.from_pretrained(folder / "one")
    shutil.rmtree(folder / "one")
    model.save_pretrained(folder, max_shard_size="200KB")


def _vae(folder: Path) -> None:
    from diffusers import AutoencoderKLCogVideoX

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoencoderKLCogVideoX(block_out_channels=(32, 32, 32, 32), layers_per_block=1)
    model.bfloat16().save_pretrained(folder)


def _vae_sat(folder: Path) -> None:
    _vae(folder / "vae")
    convert(folder / "vae", folder / "made", "sat")
    (folder / "made/3d-vae.pt").rename(folder / "3d-vae.pt")
    shutil.rmtree(folder / "vae")
    shutil.rmtree(folder / "made")


def _pipeline(folder: Path) -> None:
    _from_sat(folder / "transformer", "5b", "diffusers")
    _vae(folder / "vae")
    scheduler = {
        "_class_name": "CogVideoXDDIMScheduler",
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
        "snr_shift_scale": 1.0,
        "beta_start": 0.00085,
        "beta_end": 0.012,
    }
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')


def _peft_folder(folder: Path) -> None:
    _from_sat(folder, "5b", "peft", lora_rank=4)
    file = folder / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), folder / "adapter_model.safetensors")
    file.unlink()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"to_k": 2}}
    settings |= {"base_model_name_or_path": "any", "target_modules": ["to_q", "to_k"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _t5(folder: Path) -> None:
    import sentencepiece
    from transformers import T5Config, T5EncoderModel

    sentences, model = ["a video of the sea", "the sea at night"], io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=18,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    settings = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    T5EncoderModel(T5Config(vocab_size=32, **settings)).save_pretrained(folder)


def _encode() -> None:
    from cogfast.model.text_encoder import T5TextEncoder

    T5TextEncoder("in", max_length=8)(["the sea"])


@cache
def _model(family: str) -> DiffusionTransformer:
    """Return a model that a case changes in its own process only."""
    return tiny(family, **SMALL).bfloat16()


def _load(family: str) -> None:
    load_transformer(_model(family), "in")


def _add_lora() -> None:
    from cogfast.train.sampling.lora_overlay import LoraOverlay, add_loras, open_loras

    add_loras(_model("5b"), open_loras([LoraOverlay("in", 0.5)], ema=False))


_TO = {to: ("convert", "in", "out", "--to", to) for to in ("sat", "diffusers", "cogfast", "peft")}
_SAMPLE = ("sample", "in", "--prompt", "a prompt", "--out", "out", "--dry-run")
_LOAD_2B, _LOAD_5B, _LOAD_15 = (partial(_load, f) for f in ("2b", "5b", "1.5_5b"))
FORMATS = {
    "sat": Format(_sat, (_TO["diffusers"], _TO["cogfast"], _SAMPLE, _LOAD_2B)),
    "sat in two files": Format(_sat_cut, (_TO["sat"],)),
    "diffusers": Format(
        partial(_from_sat, family="5b", to="diffusers"), (_TO["sat"], _SAMPLE, _LOAD_5B)
    ),
    "diffusers in shards": Format(_sharded, (_TO["cogfast"], _SAMPLE, _LOAD_15)),
    "pipeline": Format(_pipeline, (_SAMPLE, _TO["sat"], _LOAD_5B)),
    "peft": Format(
        partial(_from_sat, family="5b", to="peft", lora_rank=4), (_TO["sat"], _add_lora)
    ),
    "peft folder": Format(_peft_folder, (_TO["peft"], _add_lora)),
    "sat lora": Format(
        lambda folder: save_as_sat(tiny("5b", lora_rank=4, **SMALL), folder),
        (_TO["peft"], (*_TO["cogfast"], "--merge-lora"), _add_lora),
    ),
    "cogfast": Format(
        partial(_from_sat, family="5b", to="cogfast"), (_TO["sat"], _SAMPLE, _LOAD_5B)
    ),
    "vae": Format(_vae, (_TO["sat"],)),
    "sat vae": Format(_vae_sat, (("convert", "in/3d-vae.pt", "out", "--to", "diffusers"),)),
    "t5": Format(_t5, (_encode,)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole folder of each format, made when it is first asked for."""
    root = tmp_path_factory.mktemp("whole")
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    for family in ("2b", "5b", "1.5_5b"):
        _model(family)

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            folder.mkdir()
            FORMATS[name].make(folder)
        return folder

    return make


# ---------------------------------------------------------------- damage

ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**63,
    10**30,
    -(10**18),
    0.5,
    1e300,
    -0.0,
    "",
    "x",
    "NaN",
    "../../etc/passwd",
    "/etc/passwd",
    "a" * 5000,
    "\x1b[2J\n",
    "\0",
    "os.system",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    [None],
    [1] * 1000,
    {"target": "os.system"},
    "${oc.env:HOME}",
]
DEEP = "[" * 50_000 + "]" * 50_000
TEXT = [b"", b"{", b"[]", b"null", b"1e999", b"\xff\xfe", b'{"a": NaN}', DEEP.encode(), b"\0" * 50]


def _files(folder: Path, *ends: str) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name.endswith(ends))


def _places(value: object) -> Iterator[tuple[object, object]]:
    """(container, key) of everything in a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def _odd_json(value: object, draw: random.Random) -> object:
    """Return the value with one entry changed, removed or added."""
    places = list(_places(value))
    if not places or draw.random() < 0.05:
        return draw.choice(ODD)
    container, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.7:
        container[key] = draw.choice(ODD)
    elif kind < 0.85:
        del container[key]
    elif isinstance(container, dict):
        container[draw.choice(["x", "../x", "a" * 3000, str(key) + "2"])] = container[key]
    return value


def damage_json(folder: Path, draw: random.Random) -> str | None:
    files = _files(folder, ".json")
    if not files:
        return None
    file = draw.choice(files)
    if draw.random() < 0.25:
        file.write_bytes(draw.choice(TEXT))
        return f"other text in {file.name}"
    changed = _odd_json(json.loads(file.read_text()), draw)
    file.write_text(json.dumps(changed))
    return f"another value in {file.name}"


def damage_bits(folder: Path, draw: random.Random) -> str:
    """Flip bits in the first bytes (headers), in the last (a zip's directory) or anywhere."""
    file = draw.choice([f for f in _files(folder, "") if f.stat().st_size] or [folder / "none"])
    content = bytearray(file.read_bytes())
    low, high = draw.choice([(0, 2000), (-3000, 0), (0, len(content))])
    low, high = (len(content) + low, len(content)) if low < 0 else (low, min(high, len(content)))
    for _ in range(draw.choice([1, 1, 3, 30])):
        content[draw.randrange(max(0, low), high)] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"flipped bits of {file.name}"


def damage_size(folder: Path, draw: random.Random) -> str:
    file = draw.choice(_files(folder, ""))
    content = file.read_bytes()
    kind = draw.randrange(4)
    if kind == 0:
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif kind == 1:
        file.write_bytes(b"")
    elif kind == 2:
        file.write_bytes(content + os.urandom(0) + bytes(draw.randrange(1, 5000)))
    else:
        file.unlink()
    return f"{['cut', 'empty', 'longer', 'no'][kind]} {file.name}"


def damage_kind(folder: Path, draw: random.Random) -> str:
    """Replace a file by a folder, a pipe or a dangling link."""
    file = draw.choice(_files(folder, ""))
    file.unlink()
    kind = draw.choice([Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p)])
    kind(file)
    return f"no regular file {file.name}"


def _header(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def damage_header(folder: Path, draw: random.Random) -> str | None:
    """Damage the header of a safetensors file: names, dtypes, shapes, offsets, metadata, nesting or
    length."""
    files = _files(folder, ".safetensors")
    if not files:
        return None
    file = draw.choice(files)
    header, rest = _header(file)
    names = [name for name in header if name != "__metadata__"]
    one, other = header[draw.choice(names)], header[draw.choice(names)]
    kind = draw.randrange(8)
    if kind == 0:
        one["dtype"] = draw.choice(["BOOL", "I8", "F8_E4M3", "C64", "I64", "F64", "X", 3])
    elif kind == 1:
        one["shape"] = draw.choice([[], [0], [2**62, 4], [-1], [1] * 70, 3, [one["shape"]]])
    elif kind == 2:
        one["data_offsets"] = draw.choice([other["data_offsets"], [0, 2**60], [5, 1], [], None])
    elif kind == 3:
        name = draw.choice(names)
        odd = ["", "x" * 5000, "\x1b[2J", name + ".", name.replace(".0.", ".99999999.")]
        header[draw.choice(odd)] = header.pop(name)
    elif kind == 4:
        header["__metadata__"] = draw.choice([{"lora_adapter_metadata": DEEP}, {"a": 1}, [], None])
    elif kind == 5:
        header = _odd_json(header, draw)
    elif kind == 6 and "__metadata__" in header:
        about = json.loads(header["__metadata__"].get("lora_adapter_metadata", "{}"))
        header["__metadata__"]["lora_adapter_metadata"] = json.dumps(_odd_json(about, draw))
    text = DEEP.encode() if kind == 7 else json.dumps(header).encode()
    length = draw.choice([len(text)] * 9 + [2**63])
    file.write_bytes(length.to_bytes(8, "little") + text + rest)
    return f"header of {file.name}, kind {kind}"


def _odd_tensor(tensor: torch.Tensor, draw: random.Random) -> object:
    kinds = [torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.int64]
    changes = [
        lambda: tensor.to(draw.choice(kinds)),
        lambda: tensor.to(torch.float64),
        lambda: torch.zeros(0),
        lambda: torch.tensor(1.0),
        lambda: tensor.flatten(),
        lambda: tensor[None],
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor[: max(1, len(tensor) // 2)] if tensor.dim() else tensor,
        lambda: tensor.reshape([1] * 6 + list(tensor.shape)),
        lambda: torch.full_like(tensor, float("nan")),
    ]
    return draw.choice(changes)().contiguous()


def _change(state: dict[str, torch.Tensor], draw: random.Random) -> None:
    name = draw.choice(sorted(state))
    kind = draw.randrange(5)
    if kind == 0:
        del state[name]
    elif kind == 1:
        odd = [name.replace(".0.", ".7."), name + "x", "x", "a" * 4000, "\n", ""]
        state[draw.choice(odd)] = state.pop(name)
    elif kind == 2:
        state["model.diffusion_model.more"] = torch.zeros(3)
    else:
        state[name] = _odd_tensor(state[name], draw)


def damage_tensors(folder: Path, draw: random.Random) -> str | None:
    """Write intact files with other names, shapes and dtypes."""
    file = draw.choice(_files(folder, ".safetensors", ".pt"))
    if file.suffix == ".safetensors":
        metadata = _header(file)[0].get("__metadata__")
        state = load_file(file)
        _change(state, draw)
        save_file({k: v.clone() for k, v in state.items()}, file, metadata)
    else:
        content = torch.load(file, weights_only=True)
        key = draw.choice(sorted(content))
        if draw.random() < 0.2:
            content[key] = draw.choice([None, [], 3, "x", {}, {1: 2}, {"a": {}}, torch.zeros(2)])
        else:
            _change(content[key], draw)
        torch.save(content, file)
    return f"tensors of {file.name}"


class Call:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, call: Callable, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple:
        return self.call, self.arguments


def damage_pickle(folder: Path, draw: random.Random) -> str | None:
    """A .pt file that would run something, expand to something huge, or nests."""
    files = _files(folder, ".pt")
    if not files:
        return None
    file = draw.choice(files)
    outside = folder.parent.parent / "written"
    calls = [
        Call(os.system, f"touch {outside}"),
        Call(eval, f"open({str(outside)!r}, 'w')"),
        Call(getattr, torch.Tensor, "backward"),
        Call(exec, "while True: pass"),
        Call(torch.zeros, (2**40,)),
        Call(torch._utils._rebuild_tensor_v2, 1, 2, 3, 4, 5, 6),
        Call(bytearray, 2**40),
    ]
    kind = draw.randrange(6)
    if kind == 0:
        file.write_bytes(pickle.dumps({"module": draw.choice(calls)}, protocol=2))
    elif kind == 1:
        content = torch.load(file, weights_only=True)
        content[draw.choice(sorted(content))]["x"] = draw.choice(calls)
        torch.save(content, file)
    elif kind == 2:  # one number that stands for 2**40
        few = torch.zeros(1).expand(2**20, 2**20)
        content = torch.load(file, weights_only=True)
        state = content[sorted(content)[0]]
        state[draw.choice(sorted(state))] = few
        torch.save(content, file)
    elif kind == 3:
        content = torch.load(file, weights_only=True)
        state = content[sorted(content)[0]]
        one = draw.choice(sorted(state))
        odd = [state[one].to_sparse(), torch.empty(2**20, 2**20, device="meta")]
        state[one] = draw.choice(odd)
        torch.save(content, file)
    else:
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        pickled = next(name for name in entries if name.endswith("data.pkl"))
        how = zipfile.ZIP_STORED
        if kind == 4:  # packed zeros
            entries[pickled] = bytes(20 << 20)
            how = zipfile.ZIP_DEFLATED
        else:
            bits = bytearray(entries[pickled])
            for _ in range(draw.choice([1, 3, 20])):
                bits[draw.randrange(len(bits))] = draw.randrange(256)
            entries[pickled] = draw.choice([bytes(bits), b"\x80\x02" + b"(" * 10**6 + b"l" * 10**5])
        with zipfile.ZipFile(file, "w", how) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    return f"pickle of {file.name}, kind {kind}"


def damage_names(folder: Path, draw: random.Random) -> str | None:
    """Names of files in index files and `latest` that lead elsewhere."""
    files = [*_files(folder, "index.json", "latest")]
    if not files:
        return None
    file = draw.choice(files)
    elsewhere = ["../secret", "/etc/passwd", "..", "", ".", "\0", "x" * 300, "a/../../b", "\ud800"]
    name = draw.choice(elsewhere)
    if file.suffix != ".json":
        file.write_bytes(name.encode("utf-8", "surrogatepass"))
        return f"{name[:20]!r} in {file.name}"
    content = json.loads(file.read_text())
    held = content.get("weight_map", content)
    held[draw.choice(sorted(held))] = name
    file.write_text(json.dumps(content))
    return f"{name[:20]!r} in {file.name}"


DAMAGES = (
    damage_json,
    damage_json,
    damage_bits,
    damage_size,
    damage_kind,
    damage_header,
    damage_header,
    damage_tensors,
    damage_tensors,
    damage_pickle,
    damage_names,
)


def examine(whole: Path, read: object, seed: int, folder: Path) -> list[str]:
    """Damage a copy of `whole`, read it, and return the faults of the outcome."""
    draw = random.Random(seed)
    case = folder / "beside" / f"case-{seed}"
    shutil.copytree(whole, case / "in")
    done = None
    while done is None:
        done = draw.choice(DAMAGES)(case / "in", draw)
    outcome = run_case(lambda: run(read), case)
    found = faults(outcome)
    if outcome.status == 2 and "in" not in outcome.last_line.replace("/", " ").split():
        named = ("in:", "in/", "--", "=")
        if not any(name in outcome.last_line for name in named):
            found.append(f"names no file: {outcome.last_line}")
    if outcome.status != 0 and "out" in os.listdir(case):
        found.append("left a target")
    if (folder / "written").exists():
        found.append("ran what a pickle says")
        (folder / "written").unlink()
    shutil.rmtree(case)
    return [f"seed {seed}, {read}, {done}: {fault}" for fault in found]


def examine_many(name: str, whole: Path, seeds: Iterable[int], folder: Path) -> list[str]:
    reads = FORMATS[name].reads
    (folder / "beside").mkdir(exist_ok=True)
    return [
        fault for seed in seeds for fault in examine(whole, reads[seed % len(reads)], seed, folder)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_whole_files_are_read(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Undamaged files are read, so the refusals below are due to the damage."""
    for i, read in enumerate(FORMATS[name].reads):
        case = tmp_path / str(i)
        shutil.copytree(made(name), case / "in")
        outcome = run_case(lambda read=read: run(read), case)
        assert outcome.status == 0, outcome.output


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_end_in_one_line(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    assert examine_many(name, made(name), range(5), tmp_path) == []


# A tensor that every reader of a format reads, adapters first.
READ = r"matrix_A|lora_A|qkv.bias|query_key_value.bias|to_q.bias|conv_in.conv.bias|wo.weight"


def _spoil(folder: Path, value: float) -> None:
    """Replace one number of one tensor, in a folder of any format."""
    for file in _files(folder, ".safetensors", ".pt"):
        content = torch.load(file, weights_only=True) if file.suffix == ".pt" else {}
        state = content[min(content)] if content else load_file(file)
        found = [n for part in READ.split("|") for n in state if re.search(part, n)]
        if found:
            state[found[0]].view(-1)[-1] = value
            metadata = None if content else _header(file)[0].get("__metadata__")
            torch.save(content, file) if content else save_file(state, file, metadata)
            break
    # The first format of cogfast's own folders has no checksums.
    (folder / "checksums.json").unlink(missing_ok=True)
    for config in _files(folder, "config.json"):
        config.write_text(config.read_text().replace("cogfast-weights-2", "cogfast-weights-1"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_is_refused(
    name: str, value: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    for i, read in enumerate(read for read in FORMATS[name].reads if read is not _SAMPLE):
        case = tmp_path / str(i)
        shutil.copytree(made(name), case / "in")
        _spoil(case / "in", value)
        outcome = run_case(lambda read=read: run(read), case)
        assert faults(outcome) == [] and outcome.status == 2, outcome.output
        assert re.search("has 1 of .* NaN or infinite; copy it again", outcome.last_line)
        assert re.search(r"\bin[:/]", outcome.last_line) and "out" not in os.listdir(case)


def test_a_vocabulary_on_which_tokenizers_panics(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    # Flipped bits of spiece.model: the index of a character lies outside of its table.
    assert examine_many("t5", made("t5"), [1052], tmp_path) == []


def test_a_matrix_without_its_partner(made: Callable[[str], Path], tmp_path: Path) -> None:
    assert examine_many("sat lora", made("sat lora"), [333], tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files_end_in_one_line(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    assert examine_many(name, made(name), range(100, 100 + NUM_SOAKED), tmp_path) == []
