"""Merging, overrides, origins, and building objects from target and params."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file

from cogfast.config import Config, instantiate, load_config, resolve
from cogfast.config.components import with_defaults
from cogfast.config.sat_unused import Same, rules
from cogfast.config.yaml_files import CONFIGS
from cogfast.diffusion.guidance import StaticThresholding, VanillaCFG
from tests.support.refusals import assert_refused, refusals

MODELS = [
    f"cogvideox_{name}" for name in ("2b", "2b_lora", "5b", "5b_lora", "5b_i2v", "5b_i2v_lora")
]
MODELS += ["cogvideox1.5_5b", "cogvideox1.5_5b_i2v"]


def values(config: Config) -> dict:
    return {n: OmegaConf.to_container(s, resolve=True) for n, s in config.sections().items()}


def leaves(node: object, key: str = "") -> dict[str, object]:
    if isinstance(node, dict) and node:
        pairs = [leaves(v, f"{key}.{k}" if key else str(k)) for k, v in node.items()]
        return {k: v for pair in pairs for k, v in pair.items()}
    return {key: node}


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("second", ["sft", "inference"])
@pytest.mark.parametrize("model", MODELS)
def test_upstreams_files_load_unchanged(sat_configs, model, second):
    files = [sat_configs / f"{model}.yaml", sat_configs / f"{second}.yaml"]
    config = load_config(files)
    loaded = leaves(values(config))
    moves = rules(Same, "deepspeed")
    moved = ("loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
    for file in files:
        for key, value in leaves(yaml.safe_load(file.read_text())).items():
            section, _, name = key.rpartition(".")
            if key.endswith("zero_optimization.cpu_offload"):
                assert key not in loaded  # false, DeepSpeed's default
                continue
            if section == "deepspeed" and name in moved:
                key = f"deepspeed.fp16.{name}"
            key = moves[key].key if key in moves else key
            # yaml reads 1e-8 as text, which is why SAT's files go through OmegaConf
            expected = float(value) if isinstance(value, str) and value.startswith("1e-") else value
            assert loaded[key] == expected, key
            assert config.origins[key] == file.name, key
    # A dry run is YAML with an origin at every value.
    text = config.describe()
    assert OmegaConf.to_container(OmegaConf.create(text)) == values(config)
    for line in text.splitlines():
        if line.startswith("#"):
            assert " is accepted and not used: " in line
        elif not line.rstrip().endswith((":", ": {}", "-")):
            assert line.rpartition("  # ")[2] in (*(f.name for f in files), "default"), line


@pytest.mark.parametrize("model", MODELS)
def test_a_dry_run_has_the_defaults_of_components(sat_configs, model):
    """They are comments, so that the printed configuration is the same one."""
    config = load_config([sat_configs / f"{model}.yaml", sat_configs / "sft.yaml"])
    text = config.describe(with_defaults)
    assert OmegaConf.to_container(OmegaConf.create(text)) == values(config)
    lines = [line.strip() for line in text.splitlines() if line.startswith(" ")]
    shown = {key: line for line in lines if line.endswith("# default") for key in line.split()[:2]}
    for node in (config.model.denoiser_config, config.model.loss_fn_config, config.data):
        kind, arguments = resolve(node)
        for name, parameter in inspect.signature(kind).parameters.items():
            if name not in arguments and parameter.default is not parameter.empty:
                assert yaml.safe_load(shown[f"{name}:"][2:]) == {name: parameter.default}


def test_a_dry_run_has_sats_defaults():
    config = load_config([CONFIGS / "cogvideox_5b.yaml", CONFIGS / "sft.yaml"])
    (line,) = [t for t in config.describe(with_defaults).splitlines() if "skip_frms_num" in t]
    assert line.split() == ["#", "skip_frms_num:", "3", "#", "default"]  # cogfast's is 0


def test_saved_configuration_loads_to_the_same(sat_configs, tmp_path):
    files = [sat_configs / "cogvideox_5b_i2v_lora.yaml", sat_configs / "sft.yaml"]
    config = load_config(files, ["args.train_iters=7", "data.params.video_size=[64,96]"])
    saved = write(tmp_path, "training_config.yaml", config.to_yaml())
    again = load_config([saved])
    assert values(again) == values(config)
    assert again.to_yaml() == config.to_yaml()
    assert again.unused == config.unused


def test_later_file_wins_and_the_command_line_over_all(tmp_path):
    first = write(tmp_path, "a.yaml", "args: {train_iters: 1, seed: 1, train_data: [x, y]}")
    second = write(tmp_path, "b.yaml", "args: {train_iters: 2, train_data: [z], lr: 1e-3}")
    config = load_config([first, second], ["args.lr=0.5", "deepspeed.bf16.enabled=true"])
    assert (config.args.train_iters, config.args.seed, config.args.lr) == (2, 1, 0.5)
    assert config.args.train_data == ["z"]
    assert config.args.bf16 is True
    origins = [config.origins[f"args.{k}"] for k in ("train_iters", "seed", "lr", "epochs")]
    assert origins == ["b.yaml", "a.yaml", "command line", "default"]
    assert config.origins["args.bf16"] == "command line"


def test_an_empty_section_keeps_that_of_the_files_below(tmp_path):
    first = write(tmp_path, "first.yaml", "args: {train_data: [a], lr: 0.5}\n")
    second = write(tmp_path, "second.yaml", "args:\n  # lr: 0.1\n")
    assert load_config([first, second], ["args.seed=3"]).args.lr == 0.5


def test_override_of_a_list_entry(sat_configs):
    key = "model.conditioner_config.params.emb_models[0].params.max_length"
    config = load_config([sat_configs / "cogvideox_2b.yaml"], [f"{key}=17"])
    entry = config.model.conditioner_config.params.emb_models[0]
    assert entry.params.max_length == 17
    assert entry.input_key == "txt"
    line = next(t for t in config.describe().splitlines() if "max_length" in t)
    assert line.endswith("# command line")


def test_override_values_are_yaml_or_else_text():
    overrides = ["args.load={a: folder}/x", "args.lr=1e-4", "args.epochs=null", "args.save=a=b"]
    config = load_config([], [*overrides, "args.experiment_name=run #7", "args.load_lora=#a\nb"])
    assert (config.args.experiment_name, config.args.load_lora) == ("run #7", "#a\nb")
    assert config.args.load == "{a: folder}/x"
    assert config.args.lr == 1e-4
    assert config.args.epochs is None
    assert config.args.save == "a=b"


def test_files_with_one_name_are_distinguished(tmp_path):
    one = write(tmp_path / "one", "c.yaml", "args: {seed: 1}")
    two = write(tmp_path / "two", "c.yaml", "args: {train_iters: 1}")
    config = load_config([one, two])
    assert config.origins["args.seed"] == str(one)
    assert config.origins["args.train_iters"] == str(two)


def test_interpolations_are_resolved_before_saving(tmp_path):
    file = write(tmp_path, "a.yaml", "args: {train_iters: 8, save_interval: '${args.train_iters}'}")
    config = load_config([file], ["args.train_iters=12"])
    assert config.args.save_interval == 12
    assert "${" not in config.to_yaml()


def test_loss_scaling_where_deepspeed_reads_it_wins(tmp_path):
    own = write(tmp_path, "own.yaml", "deepspeed: {hysteresis: 2, fp16: {hysteresis: 9}}")
    assert load_config([own]).deepspeed.fp16 == {"hysteresis": 9}


def test_deepspeed_section_sets_args(sat_configs):
    config = load_config([sat_configs / "cogvideox_2b.yaml", sat_configs / "sft.yaml"])
    args = config.run.args
    assert (args.batch_size, args.gradient_accumulation_steps, args.zero_stage) == (2, 1, 2)
    assert (args.lr, args.weight_decay, args.precision) == (1e-5, 1e-4, "bf16")
    assert (args.train_iters, args.eval_interval) == (1000, 100)
    assert args.experiment_name == "lora-disney"
    alone = load_config([], ["args.batch_size=9", "args.fp16=true"]).run.args
    assert (alone.batch_size, alone.precision, alone.train_iters) == (9, "fp16", 10000)
    by_epochs = load_config([], ["args.epochs=3"]).run.args
    assert (by_epochs.train_iters, by_epochs.epochs) == (None, 3)


def test_sampling_reads_its_own_batch_size_and_precision(sat_configs):
    files = [sat_configs / "cogvideox1.5_5b.yaml", sat_configs / "inference.yaml"]
    args = load_config(files).run.args
    assert (args.mode, args.batch_size, args.precision) == ("inference", 1, "bf16")
    assert (args.sampling_image_size, args.sampling_num_frames) == ([768, 1360], 22)


def test_unused_keys_are_listed_with_reasons(sat_configs):
    config = load_config([sat_configs / "cogvideox1.5_5b_i2v.yaml", sat_configs / "sft.yaml"])
    assert "SAT's code does not read it" in config.unused["model.augmentation_dropout"]
    assert {"args.no_load_rng"} <= set(config.unused)
    assert "deepspeed.zero_optimization.load_from_fp32_weights" in config.unused


def test_instantiate_builds_nested_components_first():
    threshold = {"target": "cogfast.diffusion.guidance.StaticThresholding"}
    node = {"target": "cogfast.diffusion.guidance.VanillaCFG", "params": {"dyn_thresh": threshold}}
    guider = instantiate(node, scale=3.0)
    assert (type(guider), guider.scale) == (VanillaCFG, 3.0)
    assert type(guider.thresholding) is StaticThresholding
    assert isinstance(instantiate({"target": "torch.nn.Identity"}), torch.nn.Identity)


def test_denoiser_of_sats_file_has_upstreams_table(sat_configs, golden):
    for model, shift in (("cogvideox_2b", "3.0"), ("cogvideox_5b", "1.0")):
        node = load_config([sat_configs / f"{model}.yaml"]).model.denoiser_config
        denoiser = instantiate(node)
        table = load_file(golden / "diffusion" / "tables.safetensors")[f"shift{shift}.n1000_flip"]
        torch.testing.assert_close(denoiser.table.values.float(), table, atol=1e-7, rtol=0)


def test_resolve_gives_the_callable_and_unbuilt_parts(sat_configs):
    node = load_config([sat_configs / "cogvideox_2b.yaml"]).model.sampler_config
    target, arguments = resolve(node)
    assert target.__name__ == "VPSDEDPMPP2MSampler"
    assert arguments["num_steps"] == 50
    assert arguments["guider"]["params"] == {"scale": 6, "exp": 5, "num_steps": 50}
    assert "verbose" not in arguments


def test_allow_import_opens_a_package(tmp_path, monkeypatch):
    # It changes its argument, of which the run keeps its own.
    text = "class Clips:\n    def __init__(self, data_dir, size: list): self.size = size.pop()\n"
    write(tmp_path, "my_clips.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path, "a.yaml", "data: {target: my_clips.Clips, params: {size: [3]}}")
    config = load_config([file], allow_import=["my_clips"])
    run = config.run
    assert [run.data.build(data_dir="x").size for _ in range(2)] == [3, 3]
    assert run.sections["data"]["params"] == {"size": [3]}
    absent = "No module named 'absent'; add the folder <...> PYTHONPATH"
    assert instantiate(config.data, config.allow_import, data_dir="x").size == 3
    for words, allowed, line in (
        (
            [],
            [],
            "a.yaml: data.target=my_clips.Clips<...>--allow-import with the name of your package",
        ),
        (["data.params={siz: 3}"], ["my_clips"], "unknown key data.params.siz; did you mean size"),
        (["data.target=absent.Clips"], ["absent"], absent),
    ):
        assert_refused(lambda given=(words, allowed): load_config([file], *given), line)


@refusals(Path(__file__).with_name("refusals.txt"), "two files")
def test_a_refusal_names_who_set_the_key(tmp_path, refusal):
    first, second, *words = refusal.words
    files = [write(tmp_path, "a.yaml", first), write(tmp_path, "b.yaml", second)]
    assert_refused(lambda: load_config(files, words), refusal.line)


def test_a_moved_value_keeps_its_origin_beside_an_override(tmp_path):
    text = "deepspeed: {loss_scale: 3, zero_optimization: {cpu_offload: true}}"
    overrides = ["deepspeed.zero_optimization={stage: 1}", "deepspeed={gradient_clipping: 1.0}"]
    origins = load_config([write(tmp_path, "a.yaml", text)], overrides).origins
    assert origins["deepspeed.zero_optimization.offload_optimizer.device"] == "a.yaml"
    assert origins["deepspeed.fp16.loss_scale"] == "a.yaml"
    assert origins["args.zero_stage"] == "command line"


def test_an_error_of_a_constructor_names_the_component(tmp_path, monkeypatch):
    text = "class Part:\n    def __init__(self, size):\n        raise {}\n"
    monkeypatch.syspath_prepend(tmp_path)
    for name, error, message in (
        ("a_check", "ValueError('size=0 must be positive')", "^data: size=0 must be positive$"),
        ("a_type", "TypeError('no size')", "^data: no size$"),
        ("a_key", "ValueError('data.params.size=0 is 0')", "^data.params.size=0 is 0$"),
    ):
        write(tmp_path, f"{name}.py", text.format(error))
        with pytest.raises(ValueError, match=message):
            instantiate({"target": f"{name}.Part", "params": {"size": 0}}, [name], "data")


def test_cogfasts_own_files_are_found_from_any_folder(here):
    for path in ("sft.yaml", "configs/sft.yaml"):
        assert load_config([path]).origins["args.train_iters"] == "sft.yaml"
        assert load_config([path]).args.train_iters != 3
    # A file of the user's with that name comes first.
    write(here, "sft.yaml", "args: {train_iters: 3}")
    assert load_config(["sft.yaml"]).args.train_iters == 3
    assert load_config(["configs/sft.yaml"]).args.train_iters != 3


def test_a_missing_file_has_its_near_names(here):
    write(here, "my_run.yaml", "args: {}")
    paths = ["configs/cogvideox-5b.yaml", str(here / "sft.yaml"), str(here / "myrun.yaml")]
    with pytest.raises(ValueError) as raised:
        load_config([*paths, "configs/nowhere.yaml"])
    model, other, own, unknown = str(raised.value).splitlines()
    assert model.startswith(
        "--base configs/cogvideox-5b.yaml: no such file; did you mean cogvideox_5b.yaml or"
    )
    assert other.endswith("did you mean sft.yaml?")
    assert own.endswith(f"no such file; did you mean {here / 'my_run.yaml'}?")
    assert unknown == "--base configs/nowhere.yaml: no such file; give the path of a YAML file"
