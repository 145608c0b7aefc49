"""The network that a run has trained computes the same by each way out of the run's folder."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from omegaconf import DictConfig
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.extensions.formats.adapters import only_adapters
from cogfast.extensions.formats.compare import compare_networks
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.peft import FILE_NAME
from cogfast.extensions.publish.publish import publish
from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras
from cogfast.extensions.stores import store
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer, build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from cogfast.train.assembly import assemble_transformer
from tests.model.test_lora import save_as_sat
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.s3_server import S3Server
from tests.support.tiny_transformers import randomize

LORA = ("args.lora_rank=4", "args.lora_alpha=6", "args.lora_modules=[q,v,out]")
FAST = ("deepspeed.optimizer.params.lr=0.02",)  # so that averages differ from the weights
OTHERS = "model.trainable_modules=[modulation]"
# {what a run trains: its words}
SOURCES = {"LoRA": LORA, "LoRA and other weights": (*LORA, OTHERS), "all weights": ()}
SOURCES["part of a model"] = ("model.trainable_modules=[attention]",)


@dataclass(frozen=True)
class Trained:
    run: Run
    base: Path
    outputs: dict[bool, Tensor]  # by whether the weights are averaged
    model: DictConfig  # without adapters


def output(transformer: DiffusionTransformer) -> Tensor:
    """The prediction of 3 x 4 x 4 latents, float32."""
    config, random = transformer.config, torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=random)
    text = draw(2, config.text_length, config.text_hidden_size)
    with torch.no_grad():
        return transformer(draw(2, config.in_channels, 3, 4, 4), torch.tensor([17, 863]), text)


@pytest.fixture(scope="module")
def base(shared_run: Run) -> Path:
    """A folder of diffusers, from which the runs start. Its modulation is not that of a fresh model, zero."""
    transformer = build_transformer(shared_run.config().model)
    randomize(transformer, 3)
    save_as_sat(transformer, shared_run.folder / "sat")
    convert(shared_run.folder / "sat", shared_run.folder / "base", "diffusers")
    return shared_run.folder / "base"


@pytest.fixture(scope="module")
def trained(shared_run: Run, base: Path) -> dict[str, Trained]:
    found = {}
    for name, words in SOURCES.items():
        run = shared_run.with_words(*words, f"args.load={base}", *FAST)
        run = run.into(shared_run.folder / name).train(steps=3)
        engine, outputs = run.last.engine, {}
        for is_averaged in (False, True):
            with torch.no_grad(), engine.weights("shadow" if is_averaged else "master"):
                outputs[is_averaged] = output(engine.transformer)
        found[name] = Trained(run, base, outputs, load_config([run.base]).model)
    return found


def plain(trained: Trained, folder: Path) -> DiffusionTransformer:
    """Load a model without adapters."""
    transformer = build_transformer(trained.model)
    load_transformer(transformer, folder)
    return transformer


def by_conversion(to: str, option: str) -> Callable[[Trained, bool, Path], Tensor]:
    def take(trained: Trained, ema: bool, folder: Path) -> Tensor:
        source, lora = trained.run.path, {}
        if option != "itself":
            source, lora = trained.base, {option: str(trained.run.path)}
        convert(source, folder / "out", to, ema=ema, verify=True, **lora)
        if option == "add_lora":  # as SAT's trainer reads it: alpha is 1
            config = load_config([trained.run.base], [*LORA[:1], "args.lora_alpha=1", *LORA[2:]])
            transformer = build_transformer(config.model)
            load_transformer(transformer, folder / "out")
            return output(transformer)
        return output(plain(trained, folder / "out"))

    return take


def by_overlay(trained: Trained, ema: bool, folder: Path) -> Tensor:
    transformer = plain(trained, trained.base)
    add_loras(transformer, open_loras([LoraOverlay(trained.run.path)], ema))
    return output(transformer)


def by_lora_file(to: str, reader: Callable) -> Callable[[Trained, bool, Path], Tensor]:
    def take(trained: Trained, ema: bool, folder: Path) -> Tensor:
        convert(trained.run.path, folder / "lora", to, ema=ema, verify=True)
        run = _At(replace(trained.run, last=None), folder / "lora")
        return reader(replace(trained, run=run), False, folder)

    return take


def merged_by_videox_fun(trained: Trained, _: bool, folder: Path) -> Tensor:
    """VideoX-Fun's rules: a name without the prefix is a path through the modules, with _ between them."""
    network = CogVideoXTransformer3DModel.from_pretrained(trained.base)
    layers: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(trained.run.path / FILE_NAME).items():
        layer, part = key.split(".", 1)
        layers.setdefault(layer.split("lora_unet_")[-1], {})[part] = value
    for layer, parts in layers.items():
        module, words = network, [word for word in layer.split("_") if word]
        while words:
            parts_of = dict(module.named_children())
            number = next(n for n in range(1, 5) if "_".join(words[:n]) in parts_of)
            module = getattr(module, "_".join(words[:number]))
            words = words[number:]
        up, down = parts["lora_up.weight"], parts["lora_down.weight"]
        module.weight.data += float(parts["alpha"]) / up.shape[1] * (up @ down)
    network.save_pretrained(folder / "merged")
    return output(plain(trained, folder / "merged"))


def by_load(key: str) -> Callable[[Trained, bool, Path], Tensor]:
    """Start another run with the weights, or with the adapters."""

    def take(trained: Trained, ema: bool, folder: Path) -> Tensor:
        words = [f"args.load={trained.base}"] if key == "load_lora" else []
        words += [f"args.{key}={trained.run.path}", *(LORA if key == "load_lora" else ())]
        run = replace(trained.run, words=(), last=None).into(folder).with_words(*words)
        engine = run.trainer("args.train_iters=1").engine
        return output(engine.transformer)

    return take


def by_sampling(trained: Trained, ema: bool, folder: Path) -> Tensor:
    parts = trained.run.last.parts
    network, args, groups = parts.run.network, parts.args, parts.groups
    return output(assemble_transformer(network, args, groups, str(trained.run.path), ema))


def by_publishing(trained: Trained, ema: bool, folder: Path) -> Tensor:
    path = Path(publish(trained.run.path, "me/x", is_dry_run=True))
    if (path / FILE_NAME).exists():
        return by_overlay(replace(trained, run=_At(trained.run, path)), False, folder)
    return output(plain(trained, path))


class _At:
    """A LoRA folder in the place of a run."""

    def __init__(self, run: Run, path: Path) -> None:
        self.base, self.path = run.base, path


TARGETS: dict[str, Callable[[Trained, bool, Path], Tensor]] = {
    "diffusers": by_conversion("diffusers", "itself"),
    "sat": by_conversion("sat", "itself"),
    "merged, diffusers": by_conversion("diffusers", "merge_lora"),
    "merged, sat": by_conversion("sat", "merge_lora"),
    "added, sat": by_conversion("sat", "add_lora"),
    "peft": by_lora_file("peft", by_overlay),
    "fun": by_lora_file("fun", by_overlay),
    "fun, merged by VideoX-Fun": by_lora_file("fun", merged_by_videox_fun),
    "sample": by_sampling,
    "sample --lora": by_overlay,
    "args.load": by_load("load"),
    "args.load_lora": by_load("load_lora"),
    "publish": by_publishing,
}
# {a target without an option for it: whether it takes averaged weights}
CHOOSES = {"args.load": False, "args.load_lora": False, "publish": True}

OF_ADAPTERS = ("peft", "fun", "fun, merged by VideoX-Fun", "sample --lora", "args.load_lora")
LACKS = "has no LoRA tensors"
BESIDE = "tensors beside the adapters, which adapters alone lack"
# {source: {targets: the line that refuses them}}
REFUSED = {
    "LoRA": {
        ("diffusers", "sat"): "has adapters only",
        ("args.load",): "do not fit the config, which has no adapters",
    },
    "LoRA and other weights": {
        ("diffusers", "sat"): "lacks",
        ("args.load",): "do not fit the config, which has no adapters",
        (*OF_ADAPTERS, "publish"): BESIDE,
    },
    "all weights": {OF_ADAPTERS: LACKS},
    "part of a model": {OF_ADAPTERS: LACKS},
}


CASES = [
    pytest.param(source, target, ema, id=f"{source}-{target}-{'averaged' if ema else 'plain'}")
    for source in SOURCES
    for target in TARGETS
    for ema in (False, True)
    if CHOOSES.get(target, ema) == ema
]


@pytest.mark.parametrize(("source", "target", "ema"), CASES)
def test_the_network_computes_the_same(
    source: str, target: str, ema: bool, trained: dict[str, Trained], tmp_path: Path
) -> None:
    case, take = trained[source], TARGETS[target]
    for targets, line in REFUSED[source].items():
        if target in targets:
            with pytest.raises(ValueError, match=line) as caught:
                take(case, ema, tmp_path)
            assert "\n" not in str(caught.value)
            return
    found, wanted, other = take(case, ema, tmp_path), case.outputs[ema], case.outputs[not ema]
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert (found - other).norm() > 1e-4 * wanted.norm()


WHOLE = "[attention,modulation,fc1,fc2,patch_embedding,text_embedding,time_embedding,output]"
CHANNELS = ("model.conditions=[frames]", "model.given_frames=prefix:1", "model.new_channels=zero")
CHANNELS += ("model.network_config.params.in_channels=16",)
NO_TABLE = (
    "model.network_config.params.modules.pos_embed_config.params.learnable_pos_embed=false",
)
# {case: the member, the words that stay without adapters, the words of adapters, what is trained}
CHANGES = {
    "adapted linears": ("5b", (), LORA, "[attention]"),
    "all weights beside adapters": ("5b", (), LORA, WHOLE),
    "new channels": ("5b", CHANNELS, (), "[patch_embedding]"),
    "new channels and adapters": ("5b", CHANNELS, LORA, "[patch_embedding]"),
    "no table": ("5b_i2v", ("model.learned_positions=drop", *NO_TABLE), (), "[attention]"),
    "no table and adapters": ("5b_i2v", ("model.learned_positions=drop", *NO_TABLE), LORA, "[fc1]"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_run_made_of_its_base_is_in_the_whole_model(
    case: str, shared_run: Run, base: Path, tmp_path: Path
) -> None:
    family, words, lora, modules = CHANGES[case]
    run = shared_run.of(family)
    if family != "5b":
        other = build_transformer(run.config().model)
        randomize(other, 4)
        save_as_sat(other, tmp_path / "sat")
        base = tmp_path / "base"
        convert(tmp_path / "sat", base, "diffusers")
    run = run.with_words(*words, *lora, f"model.trainable_modules={modules}", f"args.load={base}")
    run = run.with_words(*FAST).into(tmp_path / "run").train(steps=2)
    with torch.no_grad(), run.last.engine.weights("master"):
        expected = output(run.last.engine.transformer)
    plain_config = run.config().model if not lora else load_config([run.base], words).model
    merged = {"from its base": (base, str(run.path))} if lora else {"itself": (run.path, None)}
    if modules == WHOLE:
        merged["its own"] = (run.path, "")
    for name, (source, adapters) in merged.items():
        convert(source, tmp_path / name, "diffusers", merge_lora=adapters)
        transformer = build_transformer(plain_config)
        load_transformer(transformer, tmp_path / name)
        assert (output(transformer) - expected).norm() <= 1e-5 * expected.norm()
    again = run.with_words(f"args.load={run.path}").into(tmp_path / "again")
    if not lora or modules == WHOLE:
        assert torch.equal(output(again.trainer("args.train_iters=1").engine.transformer), expected)


def test_averages_are_of_the_adapters_alone(trained: dict[str, Trained], tmp_path: Path) -> None:
    """Adapters that were trained on another run's plain weights, which args.load reads, are merged into these."""
    first, words = trained["part of a model"], (*LORA, *FAST)
    run = replace(first.run, words=(), last=None).into(tmp_path / "run")
    run = run.with_words(*words, f"args.load={first.run.path}").train(steps=3)
    with torch.no_grad(), run.last.engine.weights("shadow"):
        expected = output(run.last.engine.transformer)
    convert(first.run.path, tmp_path / "out", "diffusers", ema=True, merge_lora=f"{run.path}:1.0")
    found = output(plain(first, tmp_path / "out"))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_adapters_of_a_sat_folder_keep_their_strength(
    trained: dict[str, Trained], tmp_path: Path
) -> None:
    """The file stores no alpha: a run that would take the rank is refused, and one with SAT's trains on."""
    case, folder = trained["LoRA"], tmp_path / "sat"
    convert(case.base, folder, "sat", add_lora=str(case.run.path))
    for key in ("load", "load_lora"):
        words = (f"args.load={case.base}", *LORA[::2], f"args.{key}={folder}")
        run = case.run.into(tmp_path / key).with_words(*words)
        run = replace(run, words=tuple(w for w in run.words if w not in LORA[1:2]))
        assert_refused(
            lambda run=run: run.train(steps=1), f"args.{key}={folder} has adapters without"
        )
        begun = run.with_words("args.lora_alpha=1").trainer("args.train_iters=1")
        found, wanted = output(begun.engine.transformer), case.outputs[False]
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_what_a_conversion_would_ignore_is_refused(
    trained: dict[str, Trained], base: Path, tmp_path: Path
) -> None:
    sat = tmp_path / "sat"
    convert(base, sat, "sat")
    file = sat / "1" / "mp_rank_00_model_states.pt"
    line = f"{file}: is one file, and EMA weights are in a folder; give the SAT folder"
    assert_refused(lambda: convert(file, tmp_path / "out", "diffusers", ema=True), line)
    vae = tmp_path / "vae"
    AutoencoderKLCogVideoX(
        block_out_channels=(32,) * 4, layers_per_block=1, norm_num_groups=8
    ).save_pretrained(vae)
    options = {"ema": True, "merge_lora": "x", "lora_alpha": 3.0}
    line = (
        f"{vae} is a VAE, for which --ema, --merge-lora, --lora-alpha has no meaning; leave it out"
    )
    assert_refused(lambda: convert(vae, tmp_path / "out", "sat", **options), line)
    run = trained["LoRA"].run.with_words("args.lora_alpha=0").into(tmp_path / "runs")
    assert_refused(lambda: run.train(steps=1), "lora_alpha=0 makes the adapters' output")


def test_tensors_that_are_left_out_on_purpose_refuse_no_adapters(
    trained: dict[str, Trained],
) -> None:
    """--allow-unexpected leaves out the tensors of a user's own network."""
    source = open_source(trained["LoRA and other weights"].run.path)
    kept = {name: shape for name, shape in source.shapes.items() if is_lora_parameter(name)}
    assert only_adapters(replace(source, shapes=kept)).shapes == kept
    assert_refused(lambda: only_adapters(source), BESIDE)


RANK, ALPHA = 4, 6.0
Weights = dict[str, Tensor]
Written = tuple[Weights, dict[str, str]]  # tensors and header


def peft_names(pairs: Weights) -> Written:
    """The names of diffusers' pipelines, whose files have no alpha but in the matrices."""
    scaled = {k: v * (ALPHA / RANK if "lora_B" in k else 1) for k, v in pairs.items()}
    return {f"transformer.{name}": value for name, value in scaled.items()}, {}


def with_header(key: str, prefix: str) -> Callable[[Weights], Written]:
    settings = {"r": RANK, "lora_alpha": ALPHA}

    def write(pairs: Weights) -> Written:
        named = {prefix + name: value for name, value in settings.items()}
        return {f"transformer.{k}": v for k, v in pairs.items()}, {key: json.dumps(named)}

    return write


def kohya(prefix: str, separator: str) -> Callable[[Weights], Written]:
    """kohya's and VideoX-Fun's names, with an alpha for each linear."""

    def write(pairs: Weights) -> Written:
        found = {}
        for name, value in pairs.items():
            module, side = name.removesuffix(".weight").rsplit(".lora_", 1)
            module = prefix + module.replace(".", separator)
            found[f"{module}.lora_{'down' if side == 'A' else 'up'}.weight"] = value
            found[f"{module}.alpha"] = torch.tensor(ALPHA)
        return found, {}

    return write


def wrapped(pairs: Weights) -> Written:
    """The names of a module in DDP, FSDP and torch.compile, with peft's name of the adapter, and alpha as tensors."""
    found, _ = kohya("module._orig_mod._fsdp_wrapped_module.base_model.model.", ".")(pairs)
    renamed = {
        k.replace("_down.", "_A.default.").replace("_up.", "_B.default."): v
        for k, v in found.items()
    }
    return renamed, {}


WRITERS: dict[str, Callable[[Weights], Written]] = {
    "diffusers without alpha": peft_names,
    "diffusers": with_header("lora_adapter_metadata", "transformer."),
    "finetrainers": with_header("lora_config", ""),
    "VideoX-Fun": kohya("lora_unet__", "_"),
    "kohya": kohya("lora_transformer_", "_"),
    "ComfyUI": kohya("diffusion_model.", "."),
    "DDP, FSDP and torch.compile": wrapped,
}


@pytest.fixture(scope="module")
def foreign(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Path]:
    """Adapters of PEFT on diffusers' network, and the model into which PEFT merges them."""
    network = CogVideoXTransformer3DModel.from_pretrained(base)
    modules = ["to_q", "to_v", "to_out.0", "ff.net.0.proj", "norm1.linear", "patch_embed.text_proj"]
    modules.append("patch_embed.proj")  # a convolution
    network.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules))
    random = torch.Generator().manual_seed(5)
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=random)
    pairs = get_peft_model_state_dict(network)
    network.fuse_lora()
    network.unload_lora()
    folder = tmp_path_factory.mktemp("merged")
    network.save_pretrained(folder)
    return pairs, folder


@pytest.mark.parametrize(
    "kind", [".safetensors", ".bin", pytest.param("bf16", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("writer", WRITERS)
def test_adapters_of_other_trainers_compute_the_same(
    writer: str,
    kind: str,
    foreign: tuple[Weights, Path],
    trained: dict[str, Trained],
    tmp_path: Path,
) -> None:
    case = trained["LoRA"]
    pairs, header = WRITERS[writer](foreign[0])
    expected = output(plain(case, foreign[1]))
    exact = 1e-5 * expected.norm()
    if kind == "bf16":
        pairs = {name: value.bfloat16() for name, value in pairs.items()}
        # Twice the error of rounding the matrices alone
        rounded, _ = WRITERS[writer](foreign[0])
        exact = 2 * 2**-8 * len(rounded) ** 0.5 * expected.norm()
    file = tmp_path / f"lora{'.bin' if kind == '.bin' else '.safetensors'}"
    if kind == ".bin":
        torch.save(pairs, file)
        if header:  # which a file of torch.save cannot have
            text = json.dumps({"r": RANK, "lora_alpha": ALPHA})
            (tmp_path / "adapter_config.json").write_text(text)
    else:
        save_file(pairs, file, header)
    convert(case.base, tmp_path / "merged", "diffusers", merge_lora=str(file), verify=True)
    assert (output(plain(case, tmp_path / "merged")) - expected).norm() <= exact
    at = lambda path: replace(case, run=_At(replace(case.run, last=None), path))
    for to in ("peft", "fun"):
        convert(file, tmp_path / to, to, verify=True)
        for path in (file, tmp_path / to):
            assert (by_overlay(at(path), False, tmp_path) - expected).norm() <= exact
    assert (output(plain(case, case.base)) - expected).norm() > 0.1 * expected.norm()


def test_a_convolution_s_adapters_are_read_by_diffusers(
    foreign: tuple[Weights, Path], trained: dict[str, Trained], tmp_path: Path
) -> None:
    case = trained["LoRA"]
    pairs, header = WRITERS["diffusers"](foreign[0])
    save_file(pairs, tmp_path / "lora.safetensors", header)
    convert(tmp_path / "lora.safetensors", tmp_path / "peft", "peft", verify=True)
    network = CogVideoXTransformer3DModel.from_pretrained(case.base)
    network.load_lora_adapter(load_file(tmp_path / "peft" / FILE_NAME), prefix="transformer")
    network.fuse_lora()
    network.unload_lora()
    network.save_pretrained(tmp_path / "merged")
    found, expected = (output(plain(case, x)) for x in (tmp_path / "merged", foreign[1]))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_part_of_the_strength_is_merged(trained: dict[str, Trained], tmp_path: Path) -> None:
    case = trained["LoRA and other weights"]
    convert(case.base, tmp_path / "more", "diffusers", merge_lora=f"{case.run.path}:0.5")
    name = "transformer_blocks.0.norm1.linear.weight"
    folders = (case.base, tmp_path / "more", tmp_path / "whole")
    convert(case.base, folders[2], "diffusers", merge_lora=str(case.run.path))
    start, found, end = (
        load_file(x / "diffusion_pytorch_model.safetensors")[name] for x in folders
    )
    torch.testing.assert_close(found, (start + end) / 2)
    case = trained["LoRA"]
    half = f"{case.run.path}:0.5"
    convert(case.base, tmp_path / "merged", "diffusers", merge_lora=half, verify=True)
    transformer = plain(case, case.base)
    add_loras(transformer, open_loras([LoraOverlay(case.run.path, 0.5)], False))
    expected = output(transformer)
    assert (output(plain(case, tmp_path / "merged")) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("1.5_5b", "was trained on CogVideoX-5B, but <...> is CogVideoX1.5-5B; use CogVideoX-5B"),
        ("2b", "was trained on CogVideoX-5B, but <...> is CogVideoX-2B; use CogVideoX-5B"),
        ("5b_i2v", None),
    ],
)
@pytest.mark.parametrize("source", ["run", "peft", "fun"])
def test_adapters_of_another_model_of_equal_shapes(
    source: str,
    family: str,
    line: str | None,
    trained: dict[str, Trained],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model with other positions or patches is refused, and one with other inputs is warned of."""
    case = trained["LoRA"]
    other = build_transformer(replace(case.run, words=()).of(family).config().model)
    file = str(case.run.path)
    if source != "run":
        convert(file, tmp_path / "lora", source)
        file = str(tmp_path / "lora")
    save_as_sat(other, tmp_path / "sat")
    merge = lambda: convert(tmp_path / "sat", tmp_path / "out", "sat", merge_lora=file)
    overlay = lambda: add_loras(other, open_loras([LoraOverlay(file)], False))
    # SAT's files do not tell the latent channels, so that those of a tiny 1.5 look like 1.0.
    for action in (overlay,) if family == "1.5_5b" else (merge, overlay):
        if line is not None:
            assert_refused(action, line)
        else:
            caplog.clear()
            action()
            assert "is CogVideoX-5B-I2V, which has other inputs" in caplog.text


def test_a_run_is_used_from_another_folder(
    base: Path, trained: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative args.load starts where the run was started."""
    monkeypatch.chdir(base.parent)
    words = (*SOURCES["part of a model"], f"args.load={base.name}", *FAST)
    run = replace(trained["LoRA"].run, words=(), last=None).into(tmp_path / "run")
    run = run.with_words(*words).train(steps=1)
    monkeypatch.chdir(tmp_path)
    # Another model under the same relative path
    convert(trained["all weights"].run.path, base.name, "diffusers")
    convert(run.path, "here", "diffusers", verify=True)
    monkeypatch.chdir(base.parent)
    convert(run.path, tmp_path / "there", "diffusers")
    found, expected = (
        output(plain(trained["LoRA"], tmp_path / name)) for name in ("here", "there")
    )
    assert torch.equal(found, expected)


def test_a_base_and_adapters_in_a_store_are_read(
    server: S3Server,
    base: Path,
    trained: dict[str, Trained],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base of a run that trained a part, and --merge-lora with a scale behind the address."""
    url, lora, out = f"{server.url}/base", f"{server.url}/lora", tmp_path / "out"
    for file in base.iterdir():
        store.upload(file, f"{url}/{file.name}")
    words = (*SOURCES["part of a model"], f"args.load={url}", "args.train_iters=1")
    run = replace(trained["LoRA"].run, words=words, last=None).into(tmp_path / "run")
    assert main(run.command()) == 0
    lines = capsys.readouterr().err.splitlines()
    named = lambda what: next(shlex.split(line)[3:] for line in lines if line.startswith(what))
    assert main([*named("to sample")[:-1], str(tmp_path / "samples")]) == 0
    server.requests.clear()
    assert main(["convert", str(run.path), str(out), "--to", "diffusers"]) == 2
    assert f"and {url}, which has the rest, is no folder here" in capsys.readouterr().err
    assert not server.requests  # a run's file starts no download
    command = " ".join(named("to convert")).replace(" DIR ", f" {out} ")
    assert main(command.split()) == 0
    found, start = (load_file(path / "diffusion_pytorch_model.safetensors") for path in (out, base))
    assert torch.equal(found["proj_out.weight"], start["proj_out.weight"])

    case = trained["LoRA"]
    convert(case.run.path, tmp_path / "lora", "peft")
    store.upload(tmp_path / "lora" / FILE_NAME, f"{lora}/{FILE_NAME}")
    merged = [tmp_path / "whole", tmp_path / "half"]
    merge = lambda folder, end: main(
        ["convert", str(base), str(folder), "--to", "diffusers", "--merge-lora", lora + end]
    )
    assert [merge(merged[0], ""), merge(merged[1], ":0.5"), merge(out, "x")] == [0, 0, 1]
    assert f"{lora}x: no such folder or file; correct the address" in capsys.readouterr().err
    name = "transformer_blocks.0.attn1.to_q.weight"
    whole, half = (load_file(path / "diffusion_pytorch_model.safetensors")[name] for path in merged)
    torch.testing.assert_close(half, (start[name] + whole) / 2)


def test_outputs_that_differ_are_found(base: Path, tmp_path: Path) -> None:
    """The comparison of --verify sees a change of any block's weights and of the adapters' strength."""
    source = open_source(base)
    name = "blocks.1.attention.out.weight"
    read = lambda n, shard: source.read(n, shard) * (1.01 if n == name else 1.0)
    changed = replace(source, read=read)
    assert_refused(
        lambda: compare_networks(changed, source, base), "the outputs of the networks differ"
    )
    assert "differ by at most" in compare_networks(source, source, base)
