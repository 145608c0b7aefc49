"""The network and the tensors of docs/extending.md: a trajectory fuser and noise from files, on one and two
ranks, resumed; what is trained, saved, sampled and refused."""

import json
import re
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cogfast.__main__ import main
from cogfast.extensions.formats.convert import convert
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.checkpoint_manifest import RESUMABLE, read_manifest, write_manifest
from cogfast.train.assembly import assemble_transformer
from cogfast.train.trainer import Trainer
from tests.support.refusals import Refusal, assert_command_refused, assert_refused, refusals
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, ROOT, assert_same, launch_ranks, read_run_weights
from tests.train.run.test_extending import EXAMPLES, example

DOCS = ROOT / "docs" / "extending.md"
SHAPES = {"noise": [CHANNELS, 3, 4, 4], "flow": [2, 3, 4, 4]}
OWN = [
    "model.network_config.target=mymodel.TrajectoryTransformer",
    "model.trainable_modules=[fuser, traj_extractor]",
]
NAMES = {f"traj_extractor.{kind}" for kind in ("weight", "bias")}
NAMES |= {f"blocks.{i}.fuser.{kind}" for i in range(2) for kind in ("weight", "bias")}


MORE_CLASSES = """

class Other(nn.Module):
    pass


class Dropped(TrajectoryTransformer):
    def block_arguments(self, tensors, grid):
        own = super().block_arguments(tensors, grid)
        return [[nn.functional.dropout(motion, 0.3, self.training)] for [motion] in own]


class Normed(TrajectoryTransformer):
    reset = []

    def __init__(self, config):
        super().__init__(config)
        self.traj_norm = nn.BatchNorm3d(2)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def block_arguments(self, tensors, grid):
        return super().block_arguments({"flow": self.traj_norm(tensors["flow"])}, grid)

    def reset_added(self, seed, names=None):
        self.reset.append(sorted(names))
        super().reset_added(seed, names)


class Drifting(TrajectoryTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(2**40 + 1))

    def block_arguments(self, tensors, grid):
        if self.training:
            self.mean = 0.5 * self.mean + tensors["flow"].mean()
            self.count = self.count + 1
        return super().block_arguments({"flow": tensors["flow"] - self.mean[0]}, grid)


class Turned(TrajectoryTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
"""


class World:
    """A folder with the module and the script of the examples, a manifest, and a base model."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        text = next(code for code in EXAMPLES if "class TrajectoryTransformer" in code)
        (folder / "mymodel.py").write_text(text + MORE_CLASSES)
        text = next(code for code in EXAMPLES if "class WarpedNoise" in code)
        (folder / "my_trainer.py").write_text(text)
        yaml = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
        text = next(block for block in yaml if "trainable_modules" in block)
        (folder / "trajectory.yaml").write_text(text)
        rows = []
        for i in range(6):
            row = {"path": str(data / "videos" / f"{i}.mp4"), "caption": f"bar number {i} moves"}
            for name, shape in SHAPES.items():
                values = np.random.default_rng([i, len(name)]).standard_normal(shape)
                np.save(folder / f"{name}{i}.npy", values.astype(np.float16))
                row[name] = f"{name}{i}.npy"
            rows.append(row)
        (folder / "clips.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        run = Run(data, folder).with_manifest(folder / "clips.jsonl", tensors=SHAPES)
        self.plain = run.with_args(eval_iters=1).by(Trainer, "mymodel")

    @cached_property
    def weights(self) -> Path:
        return self.plain.into(self.folder / "base").train(steps=3).checkpoint

    def run(self, name: str, *words: str) -> Run:
        """Return a run that begins with the base model's weights, in a folder of that name."""
        return self.plain.into(self.folder / name).with_words(f"args.load={self.weights}", *words)

    def warped(self, processes: int, name: str, *words: str) -> Run:
        """Run the script of the examples and return its run: of two ranks as a user starts it."""
        run = self.run(name, f"deepspeed.train_micro_batch_size_per_gpu={4 // processes}", *words)
        if processes == 1:
            run.by(example("WarpedNoise")).with_words(*OWN).train()
        else:
            own = run.of_files(run.base, self.folder / "trajectory.yaml")
            launch_ranks(processes, str(self.folder / "my_trainer.py"), *own.command()[1:])
        return run


@pytest.fixture(scope="module")
def world(data: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("own")
        patch.syspath_prepend(folder)
        yield World(folder, data)


def test_the_first_loss_is_the_base_s_and_only_the_named_modules_train(
    world: World, log: pytest.LogCaptureFixture
) -> None:
    trained = world.run("own", *OWN).train()
    plain, own = world.run("plain").train(), trained.last
    assert trained.losses[0] == plain.losses[0]  # bit for bit: the fuser is zero
    assert trained.losses[1] != plain.losses[1]
    assert "6 tensors, which start from their own initial values: blocks.*.fuser.bias" in log.text
    base, saved = read_run_weights(world.weights), trained.weights()
    assert saved.keys() == NAMES
    torch.manual_seed(0)  # changes nothing
    fresh = build_transformer(
        own.config.model, own.args.seed, own.config.allow_import
    ).named_parameters()
    initial = {name: parameter for name, parameter in fresh if name in NAMES}
    for name, parameter in own.engine.transformer.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
        else:
            assert not torch.equal(parameter, initial[name]), name
    # The constructor's values, not those that cogfast gives to its own linears.
    assert not initial["blocks.0.fuser.weight"].any()
    # PyTorch's bound of convolutions: one over the root of a patch's numbers
    bound = 1 / (2 * 2 * 2) ** 0.5
    assert 0.8 * bound < initial["traj_extractor.weight"].abs().max() <= bound


def test_the_noise_is_that_of_the_files(world: World) -> None:
    seen = []

    class Recorded(example("WarpedNoise")):
        def losses(self, batch, noised, conditioning):
            for path, noise, flow in zip(
                batch["paths"], noised.noise, conditioning.tensors["flow"], strict=True
            ):
                number = Path(path).stem
                for name, values in (("noise", noise), ("flow", flow)):
                    file = np.load(world.folder / f"{name}{number}.npy")
                    assert np.array_equal(values.numpy(), file.astype(np.float32))
                seen.append(number)
            return super().losses(batch, noised, conditioning)

    world.run("noise").by(Recorded).train(steps=2)
    assert len(seen) == 8 and len(set(seen)) == 6


def test_dropout_of_an_own_network_is_resumed_bit_for_bit(world: World) -> None:
    words = [OWN[0].replace("Trajectory", "Dropped").replace("Transformer", ""), OWN[1]]
    whole = world.run("dropped", *words).train(steps=4)
    parts = world.run("dropped parts", *words, "args.exit_interval=2").train(steps=4)
    assert parts.resume(steps=4).losses == whole.losses
    assert whole.losses[2:] != world.run("kept", *OWN).train(steps=4).losses[2:]


def test_running_means_of_added_modules_are_trained_weights(
    world: World, log: pytest.LogCaptureFixture
) -> None:
    """Checkpoints have the buffers that training changes; `sample` and a resumed run load them."""
    words = [OWN[0].replace("TrajectoryTransformer", "Normed"), "args.num_workers=0"]
    words += ["model.trainable_modules=[fuser, traj_extractor, traj_norm]"]
    whole = world.run("normed", *words).train(steps=4)
    live = dict(whole.last.engine.transformer.named_buffers())
    names = {f"traj_norm.{x}" for x in ("running_mean", "running_var", "num_batches_tracked")}
    saved = whole.weights()
    assert int(saved["traj_norm.num_batches_tracked"]) == 4
    assert saved["traj_norm.running_mean"].abs().min() > 0
    assert_same(
        {n: saved[n].view(live[n].shape) for n in names}, {n: live[n].float() for n in names}
    )
    assert "table" not in saved
    reset = type(whole.last.engine.transformer).reset
    assert len(reset) == 1 and names <= {*reset[0]}
    parts = whole.last.parts
    network, args, groups = parts.run.network, parts.args, parts.groups
    loaded = assemble_transformer(network, args, groups, str(whole.path))
    assert len(reset) == 1, "nothing of it is new"
    assert_same(dict(loaded.named_buffers()), live)

    parts = world.run("normed parts", *words, "args.exit_interval=2").train(steps=4)
    older = read_manifest(parts.checkpoint, RESUMABLE)
    parts = parts.resume(steps=4)
    assert_same(dict(parts.last.engine.transformer.named_buffers()), live)
    assert parts.losses == whole.losses
    # A checkpoint of an earlier version, without them
    del older["checksum"]
    for name in names:
        del older["frozen"][name]
        (slices,) = older["slices"].values()
        del slices[f"frozen/{name}/0"]
    first = parts.path / "checkpoints" / "00000002"
    write_manifest(first, older)
    log.clear()
    world.run(
        "normed old", *words, f"args.resume={first}", f"args.run_folder={world.folder / 'o'}"
    ).train(steps=3)
    (line,) = (text for text in log.messages if "start from their own initial values" in text)
    assert "traj_norm.running_mean" in line


def test_buffers_that_a_module_replaces_are_resumed(world: World) -> None:
    """`self.mean = ...` makes a new tensor; a counter may be larger than float32 holds."""
    words = [OWN[0].replace("TrajectoryTransformer", "Drifting"), OWN[1], "args.save_interval=1"]
    whole = world.run("drifting", *words).train(steps=4)
    assert int(whole.last.engine.transformer.count) == 2**40 + 5
    parts = world.run("drifting parts", *words, "args.exit_interval=2").train(steps=4)
    parts = parts.resume(steps=4)
    made, live = (dict(r.last.engine.transformer.named_buffers()) for r in (parts, whole))
    assert_same(made, live)
    assert parts.losses == whole.losses
    assert_same({"mean": parts.weights()["mean"]}, {"mean": live["mean"]})


def test_complex_buffers_are_refused(world: World) -> None:
    words = [OWN[0].replace("TrajectoryTransformer", "Turned"), OWN[1]]
    line = "Turned: turns is complex, and training would drop its imaginary part; register torch.view_as_real"
    assert_refused(world.run("turned", *words).trainer, line)


def test_unknown_tensors_beside_new_ones_are_refused(world: World, tmp_path: Path) -> None:
    """They may be the trained ones of the network under other names."""
    convert(world.weights, tmp_path / "base", "diffusers")
    file = tmp_path / "base" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), "fuser_list.0.weight": torch.ones(2)}, file)
    load = f"args.load={file.parent}"
    line = "unknown names (fuser_list.0.weight), and what TrajectoryTransformer adds is not there (blocks.0.f"
    assert_refused(world.run("unknown", *OWN, load).trainer, line)
    assert world.run("unknown", *OWN, load, "args.force_train=true").trainer().step == 0
    assert world.run("unknown", load).trainer().step == 0  # a warning, as before


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_resumed_bit_for_bit(world: World, processes: int) -> None:
    whole = world.warped(processes, f"whole{processes}")
    parts = world.warped(processes, f"parts{processes}", "args.exit_interval=2")
    assert len(parts.losses) == 2
    world.warped(processes, f"parts{processes}", f"args.resume={parts.path}")
    assert parts.losses == whole.losses
    assert_same(parts.weights(), whole.weights())
    assert parts.weights().keys() == NAMES
    if processes == 2:
        one = world.warped(1, "of one process")
        assert whole.losses == pytest.approx(one.losses, rel=1e-5)


def test_other_commands_take_the_option(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    done = world.run("commands", *OWN, "model.trainable_modules=[fuser]").train(steps=1)
    trainer, run, saved = done.last, str(done.path), done.weights()
    # No other file has the modules that are added and not trained.
    assert saved.keys() == NAMES
    frozen = trainer.engine.transformer.get_parameter("traj_extractor.weight")
    assert not frozen.requires_grad and torch.equal(saved["traj_extractor.weight"], frozen)
    sample = ["sample", run, "--prompt", "a bar", "--steps", "2", "--out", str(tmp_path / "out")]
    sample += [
        word for name in SHAPES for word in ("--tensor", f"{name}={world.folder / name}0.npy")
    ]
    own = ["--allow-import", "mymodel"]
    plan = ["plan", "--base", str(done.base), *done.words, "--gpu", "24"]
    convert = ["convert", run, str(tmp_path / "sat"), "--to", "sat"]
    reasons = (
        "only dit_video_concat.DiffusionTransformer is supported; use it; a class that you wrote",
        "that you wrote needs --allow-import with the name",
        "has only tensors of a network of its own, which no",
    )
    for command, reason in zip((sample, plan, convert), reasons, strict=True):
        assert_command_refused(capsys, command, reason)
    assert main([*sample, *own]) == 0
    assert list((tmp_path / "out").glob("*.mp4"))
    assert main([*plan, *own]) == 0
    assert "GiB" in capsys.readouterr().out


@refusals(Path(__file__).with_name("refusals_own_network.txt"))
def test_refused(world: World, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base of a row names the network, or is none."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    own = OWN if refusal.base == "own network" else []
    assert_refused(world.run("refused", *own, *refusal.words).train, refusal.line)


def test_adapters_and_modules_together(world: World, tmp_path: Path) -> None:
    """LoRA beside the added modules, under a policy that recomputes blocks, and from a latent cache."""
    lora = [*OWN, "args.lora_rank=2", "args.train_iters=2"]
    runs = [
        world.run(f"lora-{policy}", *lora, f"args.activation_checkpointing={policy}").train()
        for policy in ("none", "full", "pointwise")
    ]
    names = runs[0].weights().keys()
    assert names > NAMES and all("matrix_" in name for name in names - NAMES)
    assert runs[0].losses == runs[1].losses == runs[2].losses
    merge = lambda **kw: convert(
        world.weights, tmp_path / "merged", "diffusers", merge_lora=str(runs[0].path), **kw
    )
    assert_refused(merge, "6 tensors with unknown names: blocks.0.fuser")
    merge(allow_unexpected=True, verify=True)
    cached = world.run("cached", *lora).cached_in(tmp_path).train("args.encode_first=true")
    assert cached.losses == pytest.approx(runs[0].losses, rel=1e-5)
