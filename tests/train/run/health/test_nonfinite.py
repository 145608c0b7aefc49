"""Steps that are not finite: named with rank, samples and place; stop, rollback and replay."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.core.slot_random import SlotRandom
from cogfast.data.global_order import GlobalOrder
from cogfast.schema.arguments import TrainArguments
from cogfast.train.run.health.nonfinite import FirstBad, NonfiniteCheck
from cogfast.train.run.health.recorded_batch import read_recorded
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    CHANNELS,
    read_run_weights,
    run_folder,
    run_program,
    write_clips,
    write_config,
)

NUM_SAMPLES, SEED, BATCH = 32, 1234, 4
NUMEL = 2 * CHANNELS * 3 * 4 * 4  # of a micro-batch of two samples
BAD_STEP, BAD_SLOT = 4, 2  # the first place that reads the bad sample; steps count from 1
BAD = GlobalOrder(NUM_SAMPLES, SEED, BATCH).index(BAD_STEP - 1, BAD_SLOT)


class OneBad(Dataset):
    """Latents and embeddings; sample `bad` has a NaN in its latents."""

    def __init__(self, data_dir: list[str], bad: int = BAD) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator().manual_seed(index)
        latents = torch.randn(CHANNELS, 3, 4, 4, generator=generator)
        if index == self.bad:
            latents[0, 0, 0, 0] = math.nan
        return {
            "encoded_videos": latents,
            "prompt_embedding": torch.randn(8, 16, generator=generator),
        }


def one_bad(bad: int = BAD) -> dict:
    return {"target": "tests.train.run.health.test_nonfinite.OneBad", "params": {"bad": bad}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data"), num_clips=1)


def make(folder: Path, data: Path, *overrides: str, bad: int = BAD, **args: object) -> Trainer:
    """A run of micro-batches of 2 that has 6 layers."""
    values = {"train_iters": 6, "gradient_accumulation_steps": 2, **args}
    base = write_config(folder / "base.yaml", data, dataset=one_bad(bad), **values)
    own = (
        "model.network_config.params.num_layers=6",
        "deepspeed.train_micro_batch_size_per_gpu=2",
    )
    return Trainer(load_config([base], [*own, *overrides], allow_import=["tests"]))


def timestep(trainer: Trainer) -> int:
    rng = SlotRandom(SEED, BAD_STEP - 1, [BAD_SLOT], BATCH)
    return trainer.diffusion.loss.sigma_sampler.sample(rng).item()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, str, Trainer]:
    """The folder of a run that stopped at its bad step, its error and its trainer."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = make(folder, data, nonfinite="stop")
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return run_folder(folder / "runs"), str(error.value), trainer


def test_a_bad_sample_stops_the_run_and_is_named(stopped: tuple[Path, str, Trainer]) -> None:
    run, error, trainer = stopped
    (recorded,) = read_recorded(run / "nonfinite" / f"step-{BAD_STEP:08d}")
    assert error == (
        f"args.nonfinite=stop: step {BAD_STEP}, rank 0: samples: sample {BAD} at timestep "
        f"{timestep(trainer)}; not finite: the batch's encoded_videos (1 NaN of {NUMEL} values); "
        f"{recorded.report.rpartition('; ')[2]}; the checkpoint of step {BAD_STEP} is saved"
    )
    weights = read_run_weights(run / "checkpoints" / f"{BAD_STEP:08d}")
    assert all(value.isfinite().all() for value in weights.values())
    # Slots 2 and 3 are the second micro-batch.
    assert (recorded.step, recorded.number, recorded.slots) == (BAD_STEP, 1, [2, 3])
    assert recorded.batch["encoded_videos"][0].isnan().sum() == 1
    assert recorded.inputs["timesteps"][0].item() == timestep(trainer)
    assert recorded.report in error
    # The losses of the second run are no training losses.
    assert not trainer.learning.bands.sums.any()


def test_a_replay_says_the_same(
    stopped: tuple[Path, str, Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped[0]
    folder = run / "nonfinite" / f"step-{BAD_STEP:08d}"
    assert main(["train", "--replay", str(folder), "--allow-import", "tests"]) == 0
    weights, *found = capsys.readouterr().out.splitlines()
    assert weights.startswith(f"{folder}: weights of step {BAD_STEP} (")
    (recorded,) = read_recorded(folder)
    assert found == [f"step {BAD_STEP}, rank 0, micro-batch 1: {recorded.report}"]


def test_a_replay_of_another_model_or_of_no_batch_is_refused(
    stopped: tuple[Path, str, Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped[0]
    folder = run / "nonfinite" / f"step-{BAD_STEP:08d}"

    def refused(*words: str) -> str:
        assert main(["train", "--replay", *words, "--allow-import", "tests"]) == 2
        return capsys.readouterr().err

    small = "model.network_config.params.num_layers=2"
    assert "it is of another model, whose num_layers is 6 and not 2" in refused(str(folder), small)
    checkpoint = run / "checkpoints" / f"{BAD_STEP:08d}"
    assert "it has no micro-batch; give a folder nonfinite/step-N" in refused(str(checkpoint))
    assert "it is not in a run" in refused(str(tmp_path / "nonfinite" / "step-1"))
    copied = run / "nonfinite" / "step-00000099"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes()[:-40])
    assert "damaged JSON" in refused(str(copied))
    (copied / "rank-0-batch-1.json").write_bytes((folder / "rank-0-batch-1.json").read_bytes())
    assert "rank-0-batch-1.safetensors: missing or damaged" in refused(str(copied))


def test_a_weight_of_block_3_is_named_and_not_saved(tmp_path: Path, data: Path) -> None:
    trainer = make(tmp_path, data, bad=-1, nonfinite="stop", train_iters=1)
    weight = trainer.engine.transformer.blocks[3].fc1.weight
    with torch.no_grad():
        weight[5, 7] = math.inf
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    place = (
        f"weights blocks.3.fc1.weight (1 inf of {weight.numel()} values); then blocks.3.fc1: output"
    )
    assert f"not finite: {place} of aten." in str(error.value)
    assert str(error.value).endswith(
        "its weights are damaged and not saved: resume from an earlier checkpoint"
    )
    assert not list(run_folder(tmp_path / "runs").glob("checkpoints/*"))


def test_rollback_is_a_resume_that_leaves_steps_out(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints at steps 2 and 4; step 4 is bad: state of step 2, data of steps 5 and 6."""
    args = {"save_interval": 2, "keep_last": 0}
    trainer = make(tmp_path / "a", data, nonfinite="rollback", **args)
    trainer.train()
    assert "steps 3 to 4 count as skipped" in caplog.text
    run = run_folder(tmp_path / "a" / "runs")
    resume = (f"args.resume={run}/checkpoints/00000002", "args.accept_changes=true")
    wanted = make(tmp_path / "b", data, *resume, bad=-1, **args)
    wanted.step = BAD_STEP
    wanted.train()
    for part, other in zip(trainer.engine.parts, wanted.engine.parts, strict=True):
        assert torch.equal(part, other)
    for kind in trainer.engine.state_kinds():
        for i in range(len(trainer.engine.parts)):
            assert torch.equal(trainer.engine.state(i)[kind], wanted.engine.state(i)[kind])


@pytest.mark.parametrize("is_spent", [False, True])
@pytest.mark.parametrize("has_bad_loss", [False, True])
def test_fp16_reports_bad_losses_and_a_spent_scale(has_bad_loss: bool, is_spent: bool) -> None:
    args = TrainArguments(fp16=True)
    first = SimpleNamespace(losses={1: 7} if has_bad_loss else {}, skipped=5)
    found = NonfiniteCheck._first_bad_step(SimpleNamespace(args=args, first_bad=first), is_spent)
    assert found == (5 if is_spent else 7 if has_bad_loss else None)


def test_marks_are_the_first_bad_steps() -> None:
    """Random losses and skipped steps of 3 ranks with 2 micro-batches, against lists."""
    draw = random.Random(0)
    groups = [
        SimpleNamespace(data_rank=i, data_size=3, device=torch.device("cpu")) for i in range(3)
    ]
    ranks = [FirstBad(group) for group in groups]
    end = 10
    for number in (1, 4, 20, 1, 7):
        losses: dict[int, int] = {}
        skipped = None
        for step in range(end + 1, end + number + 1):
            is_skipped = draw.random() < 0.1
            skipped = skipped or (step if is_skipped else None)
            for i, rank in enumerate(ranks):
                values = [draw.choice([0.5] * 30 + [math.nan, math.inf]) for _ in range(2)]
                if not all(map(math.isfinite, values)):
                    losses.setdefault(i, step)
                for value in values:
                    rank.add_loss(torch.tensor(value))
                rank.end_step(torch.tensor(float(is_skipped)))
        end += number
        means = torch.stack([rank.marks() for rank in ranks]).mean(0).tolist()
        for rank in ranks:
            rank.read(means, end)
            assert (rank.losses, rank.skipped) == (losses, skipped)


@pytest.mark.slow
def test_one_of_two_ranks_is_named(tmp_path: Path, data: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data, dataset=one_bad(), train_iters=BAD_STEP)
    words = ["deepspeed.train_micro_batch_size_per_gpu=2", "--allow-import", "tests"]
    done = run_program(["-m", "cogfast", "train", "--base", str(base), *words], 2)
    assert done.returncode == 0, done.stdout
    # Rank 1 has slots 2 and 3.
    (line,) = [line for line in done.stdout.splitlines() if "not finite: " in line]
    assert f"step {BAD_STEP}, rank 1: samples: sample {BAD} at timestep " in line
    assert line.endswith("(weights: those of that step)")
    folder = run_folder(tmp_path / "runs") / "nonfinite" / f"step-{BAD_STEP:08d}"
    assert {file.stem for file in folder.iterdir()} == {"rank-1-batch-0"}
