"""Tensors of data.params.tensors in sampled videos: those of `cogfast sample --tensor` and of held-out samples."""

import copy
import importlib
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cogfast.__main__ import main
from cogfast.cli.options import parse_sample
from cogfast.diffusion.loss import NUM_BANDS
from cogfast.extensions.page.page import page_of
from cogfast.extensions.page.record import read_run
from cogfast.extensions.sample.next_commands import log_commands
from cogfast.train.trainer import Trainer
from tests.extensions.page.run_folders import Page
from tests.support.refusals import Refusal, assert_command_refused, refusals
from tests.support.tiny_run import launch_ranks, run_folder
from tests.train.run.test_own_network import OWN, SHAPES, World

# Several commands in one launch, since starting ranks takes most of the time.
COMMANDS = """
import json, sys
from cogfast.__main__ import main
from cogfast.distributed.process_groups import start_processes
groups = start_processes()
assert [main(words) for words in json.loads(sys.argv[1])] == [0, 0]
groups.close()
"""
LATENTS = {"latents": "args.only_save_latents=true", "of_run": "args.only_log_video_latents=true"}


class Sampled(World):
    """A world with a run of the network of docs/extending.md and an evaluation at its end.

    evaluated: the flows that the network saw in it."""

    def __init__(self, folder: Path, data: Path) -> None:
        super().__init__(folder, data)
        for i in range(2):
            for name, shape in SHAPES.items():
                values = np.random.default_rng([i, 7]).standard_normal(shape)
                np.save(folder / f"{name}-{i}.npy", values)
        rows = (folder / "clips.jsonl").read_text().splitlines()
        (folder / "valid.jsonl").write_text("\n".join(rows[4:]))
        self.evaluation = [f"args.valid_data=[{folder / 'valid.jsonl'}]", LATENTS["of_run"]]
        self.evaluation += ["args.eval_iters=2", "args.eval_batch_size=1"]
        self.evaluation += ["args.eval_num_samples=2", "args.eval_sampling_steps=2"]
        with pytest.MonkeyPatch.context() as patch:
            self.evaluated = record(patch)
            words = ["args.train_iters=3", "deepspeed.optimizer.params.lr=0.05"]
            words += ["args.eval_at_end=true", "args.eval_prompts=[one, two]"]
            self.trainer = self.trained("flow", OWN[0], *words, *self.evaluation)

    def trained(self, name: str, *words: str) -> Trainer:
        """Train from new weights in a folder of that name."""
        trainer = self.plain.into(self.folder / name).train(*words).last
        assert trainer is not None
        return trainer

    def sample(self, out: Path, *flows: int, words: list[str] | None = None) -> list[Tensor]:
        """Sample two prompts with the flows of these numbers, or with `words`."""
        assert main(self.words_of(out, *flows, words=words)) == 0
        return latents(out)

    def words_of(self, out: Path, *flows: int, words: list[str] | None = None) -> list[str]:
        given = [f"flow={self.folder}/flow-{i}.npy" for i in flows]
        given = [f"noise={self.folder}/noise-0.npy", *given] if words is None else words
        prompts = ["--prompt", "a bar", "--prompt", "another bar", "--steps", "2"]
        sample = ["sample", str(self.trainer.folder), *prompts, "--guidance", "6"]
        sample += ["--out", str(out), "--allow-import", "mymodel", LATENTS["latents"]]
        return [*sample, *(word for value in given for word in ("--tensor", value))]


def record(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Keep the flows that the network sees outside of training."""
    network, seen = importlib.import_module("mymodel").TrajectoryTransformer, []
    own = network.block_arguments

    def recorded(self, tensors, grid):
        seen.extend([] if self.training else [tensors["flow"].clone()])
        return own(self, tensors, grid)

    patch.setattr(network, "block_arguments", recorded)
    return seen


def latents(out: Path) -> list[Tensor]:
    return [load_file(file)["latents"] for file in sorted(out.glob("*.safetensors"))]


@pytest.fixture(scope="module")
def world(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sampled")
        patch.syspath_prepend(folder)
        yield Sampled(folder, data)


def numbers(world: World, *names: str) -> Tensor:
    files = [np.load(world.folder / f"{name}.npy").astype(np.float32) for name in names]
    return torch.from_numpy(np.stack(files))


def test_evaluations_have_the_tensors_of_the_held_out_samples(world: Sampled) -> None:
    held_out, seen = ["flow4", "flow5"], iter(world.evaluated)
    order = []
    for _ in held_out:  # the losses: each batch in each band
        first = next(seen)
        order += [name for name in held_out if torch.equal(first, numbers(world, name))]
        for _ in range(NUM_BANDS - 1):
            assert torch.equal(next(seen), first)
    assert sorted(order) == held_out
    for name in held_out:  # the videos, two steps each, with both halves of guidance in one batch
        for _ in range(2):
            assert torch.equal(next(seen), numbers(world, name, name))
    assert next(seen, None) is None


def test_sampling_has_the_numbers_of_the_files(
    world: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record(monkeypatch)
    found = world.sample(tmp_path / "own", 0, 1)
    own = ["flow-0", "flow-1"]
    assert len(seen) == 2
    assert all(torch.equal(flow, numbers(world, *own, *own)) for flow in seen)
    # One for all prompts: only the video whose flow is another one changes.
    others = world.sample(tmp_path / "one", 1)
    assert torch.equal(others[1], found[1])
    assert (others[0] - found[0]).norm() > 1e-3 * found[0].norm()


@pytest.mark.soak
def test_two_replicas(world: Sampled, tmp_path: Path) -> None:
    """A video of each rank: `cogfast sample`, and an evaluation of a run that two ranks train."""
    words = [f"args.load={world.trainer.writer.saved}", "args.train_iters=1", *world.evaluation]
    words += ["args.eval_at_start=true", OWN[0]]
    micro = "deepspeed.train_micro_batch_size_per_gpu=2"
    train = world.plain.into(tmp_path / "run").command(*words, micro)
    commands = [world.words_of(tmp_path / "two", 0, 1), train]
    launch_ranks(2, "-c", COMMANDS, json.dumps(commands))
    evaluated = world.trained("again", *words).evaluator.samples
    assert evaluated is not None
    again = run_folder(tmp_path / "run") / "samples" / evaluated.name
    for found, expected in (
        (latents(tmp_path / "two"), world.sample(tmp_path / "one", 0, 1)),
        (latents(again), latents(evaluated)),
    ):
        assert len(found) == 2
        torch.testing.assert_close(found, expected)


def test_the_commands_of_the_run_name_them(world: Sampled, log: pytest.LogCaptureFixture) -> None:
    folder = world.trainer.folder
    log_commands(world.trainer.config.run, str(folder), 3, is_lora=False, shows_ema=False)
    page = Page(page_of([read_run(folder)], folder / "index.html"))
    logged = next(line for line in log.messages if line.startswith("to sample")).split("  ")[-1]
    shown = next(line for line in page.code if line.startswith("cogfast sample"))
    # The page may be that of a received run: it names no package.
    for line, package in ((logged, "mymodel"), (shown, "PACKAGE")):
        request = parse_sample(shlex.split(line)[2:])
        assert request.tensors == ["noise=FILE.npy", "flow=FILE.npy"], line
        assert request.allow_import == [package], line
    converts = [line for line in (*page.code, *log.messages) if "cogfast convert" in line]
    # No other format has added modules.
    assert len(converts) == 3 and all("--allow-unexpected" in line for line in converts)
    config = copy.deepcopy(world.trainer.config)
    config.model.trainable_modules = ["fuser"]
    log.clear()
    log_commands(config.run, str(folder), 3, is_lora=False, shows_ema=False)
    assert not any(line.startswith("to convert") for line in log.messages), "it has no others"


@refusals(Path(__file__).with_name("refusals.txt"), "tensors")
def test_refused(
    world: Sampled, refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    np.save(world.folder / "code.npy", np.array([print], dtype=object), allow_pickle=True)
    np.save(world.folder / "nan.npy", np.full(SHAPES["flow"], np.nan))
    refusal = refusal.fill(folder=world.folder)
    words = [] if refusal.words == ["none"] else refusal.words
    assert_command_refused(capsys, world.words_of(tmp_path / "out", words=words), refusal.line)
    assert not (tmp_path / "out").exists()


def test_a_network_of_cogfast_takes_none(
    world: Sampled, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its Trainer may use them: videos are sampled without, also those of given prompts."""
    prompts = ["args.eval_prompts=[a bar]", "args.eval_at_start=true", "args.train_iters=1"]
    trainer = world.trained("plain", *world.evaluation[1:], *prompts)
    assert len(latents(trainer.evaluator.samples)) == 1
    sample = ["sample", str(trainer.folder), "--prompt", "a bar", "--steps", "1"]
    assert main([*sample, "--out", str(tmp_path / "out")]) == 0
    line = "dit_video_concat.DiffusionTransformer takes none of data.params.tensors; leave it out"
    words = [*sample, "--tensor", "flow=x.npy", "--out", tmp_path / "no"]
    assert_command_refused(capsys, words, line)
