"""cogfast train, plan and cache FOLDER --data PATH: compared with the YAML files that a dry run prints."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.cli.options import parse_cache, parse_plan, parse_train
from cogfast.config import load_config
from cogfast.train.run.terminal import log_unused
from tests.support.pipelines import Pipelines
from tests.support.refusals import Refusal, assert_command_refused, assert_line, refusals
from tests.support.runs import Run
from tests.support.tiny_run import losses, run_folder

SHORT = ("args.train_iters=2", "args.warmup_steps=0", "args.log_interval=1", "args.num_workers=0")


def losses_of(save: Path) -> list[float]:
    return losses(run_folder(save))


@pytest.mark.parametrize("lora", [4, None], ids=["LoRA", "all weights"])
def test_a_run_without_yaml_is_that_of_the_printed_configuration(
    lora: int | None, here: Path, pipelines: Pipelines, data: Path, answer
) -> None:
    words = ["train", str(pipelines.path("5b")), "--data", str(data), "--out", "runs", *SHORT]
    words += [] if lora is None else ["--lora", str(lora)]
    assert main(words) == 0
    found = losses_of(here / "runs")
    assert len(found) == 2
    Path("kept.yaml").write_text(answer(*words, "--dry-run"))
    assert main(["train", "--base", "kept.yaml", "args.save=again"]) == 0
    assert losses_of(here / "again") == found
    # The printed keys are those of the folder and of the words.
    kept = OmegaConf.load("kept.yaml")
    sizes = json.loads((pipelines.path("5b") / "transformer" / "config.json").read_text())
    params = kept.model.network_config.params
    assert params.num_layers == sizes["num_layers"]
    assert params.num_attention_heads == sizes["num_attention_heads"]
    # Both upstream trainers have these values; the pipeline of the folder has others.
    assert params.modules.pos_embed_config.params.get("positions", "integer") == "integer"
    assert kept.model.scale_factor == 0.7 and kept.args.load == str(pipelines.path("5b"))
    assert kept.args.lr == (1e-4 if lora else 1e-5)
    trained = "LoRA rank 4, alpha 4, strength 1, on q k v out"
    assert (trained in (run_folder(here / "runs") / "log.txt").read_text()) == bool(lora)


def test_plan_and_cache_take_the_words_of_train(
    here: Path, pipelines: Pipelines, data: Path, answer, capsys: pytest.CaptureFixture
) -> None:
    words = [str(pipelines.path("5b")), "--data", str(data), "--lora", "4", "args.batch_size=2"]
    Path("kept.yaml").write_text(answer("train", *words, "--dry-run"))
    plan = answer("plan", *words, *(cards := ["--gpu", "h100-80", "--gpus", "2"]))
    assert plan == answer("plan", "--base", "kept.yaml", *cards) and "on: 2 GPUs" in plan
    assert parse_cache(words)[0] == parse_plan(words)[0] == parse_train(words)
    assert main(["cache", *words, "args.latent_cache=cache"]) == 0
    assert "cache: 6 samples, 0 bad" in capsys.readouterr().err
    # A plan reads no data, so that they may be left out.
    request, *_ = parse_plan([*words[:1], *words[3:]])
    assert request.settings.items() < parse_train(words).settings.items()


@refusals(Path(__file__).with_name("refusals.txt"), "train")
def test_mistakes_end_in_one_line(
    refusal: Refusal, pipelines: Pipelines, data: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    for name, text in (("lists/prompt", "a"), ("lists/video", "a.mp4"), ("pointer/a", "a")):
        Path(name).parent.mkdir(exist_ok=True)
        Path(f"{name}.txt").write_text(text)
    Path("lists", "a.mp4").write_text("no video")
    Path("mine.yaml").touch()
    Path("ran").mkdir()
    Path("ran", "training_config.yaml").touch()
    Path("pointer", "a.mp4").write_text("version x/git-lfs/spec/v1\noid sha256:1\n")
    Path("none.csv").write_text("path,caption\na.mp4,x\nb.mp4,y\n")
    refusal = refusal.fill(data=data, **{"5b": pipelines.path("5b")})
    assert main(["train", *refusal.words]) == 2
    *logged, line = capsys.readouterr().err.splitlines()
    assert_line(line, refusal.line)
    assert (
        not logged
        or "none.csv: 2 of 2 rows name a file that does not exist or is refused" in logged[-1]
    )


def test_a_short_run_has_a_shorter_warmup(
    here: Path, pipelines: Pipelines, data: Path, capsys: pytest.CaptureFixture
) -> None:
    """A tenth of the steps, which a resume keeps, also one that has nothing but the run's folder."""
    words = [str(pipelines.path("5b")), "--data", str(data), "--lora", "2", "args.log_interval=1"]
    words += ["args.num_workers=0", "args.lr=0.001", "args.run_folder=run"]
    assert main(["train", *words, "args.train_iters=20", "args.exit_interval=3"]) == 0
    assert (
        "args.warmup_steps=2: the smaller of 100 and a tenth of the steps"
        in capsys.readouterr().err
    )
    assert OmegaConf.load("run/training_config.yaml").args.warmup_steps == 2
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("lr") for line in lines]
    assert [rate for rate in rates if rate][:2] == pytest.approx([0.0005, 0.001])
    again = ["args.train_iters=40", "args.exit_interval=2"]
    assert main(["train", *words, "--resume", "run", *again]) == 0
    assert "args.warmup_steps=2: the smaller" in capsys.readouterr().err
    assert main(["train", "--resume", "run", *again, "args.exit_interval=1"]) == 0
    assert Path("run/checkpoints/00000005").exists()


def test_a_run_alone_continues_where_it_is(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It may be moved, and resumed from another folder; changes that were accepted once are refused again."""
    run.train("args.run_folder=run", steps=1)
    alone = lambda path, *words: main(["train", "--resume", path, *words])
    assert alone("run", "args.train_iters=2", "--lr", "1e-3", "--accept-changes") == 0
    assert alone("run", "args.train_iters=3", "--lr", "2e-3") == 2
    line = "args.lr: 0.001 -> 0.002; change it back, or resume anyway with args.accept_changes=true"
    printed = capsys.readouterr().err
    assert line in printed and "run_folder: " not in printed
    Path("run").rename("moved")
    (here / "other").mkdir()
    monkeypatch.chdir("other")
    assert alone("../moved", "args.train_iters=3") == 0
    assert Path("../moved/checkpoints/00000003").exists()
    assert not [*Path().iterdir()] and not Path("../run").exists()
    capsys.readouterr()
    assert alone("../other") == alone("../none") == alone("..") == 2
    lines = capsys.readouterr().err.splitlines()
    there = (
        "the runs, newest first, are ../moved; for the newest write cogfast train --resume ../moved"
    )
    assert lines == [
        "cogfast: args.resume=../other is not a run or checkpoint; set it to its folder",
        f"cogfast: ../none: no such file or folder; {there}",
        f"cogfast: .. is a folder of runs, and no run; {there}",
    ]
    gone = "../moved/checkpoints/00000001"
    assert alone(gone) == main(["sample", gone, "--prompt", "a"]) == 2
    line = f"cogfast: {gone}: cannot be read: no such folder; the last good one is that of step 3: give"
    assert capsys.readouterr().err.count(f"{line} ../moved/checkpoints/00000003") == 2


def test_a_file_of_ones_own_counts_more_than_the_folders(
    here: Path, pipelines: Pipelines, data: Path, answer
) -> None:
    mine = {
        "args": {"lr": 0.003, "save": "elsewhere"},
        "model": {"network_config": {"params": {"num_frames": 9}}},
    }
    Path("mine.yaml").write_text(json.dumps(mine))
    words = ["train", str(pipelines.path("5b")), "--data", str(data), "--out", "runs"]
    found = OmegaConf.create(answer(*words, "--base", "mine.yaml", "--dry-run"))
    params = found.model.network_config.params
    assert (found.args.lr, params.num_frames, found.args.save) == (0.003, 9, "runs")
    assert found.args.load == str(pipelines.path("5b")) and found.args.train_iters == 1000


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("args.min_lr_ratio=0.5 args.lr_schedule=sat", "args.min_lr_ratio: no effect, args.lr_sch"),
        ("args.lr_power=2", "args.lr_power: no effect, args.lr_schedule=cosine does not read it"),
        (
            "args.valid_data=[{data}]",
            "args.valid_data: no effect, the run has no evaluations; set ",
        ),
        ("args.eval_prompts=[a]", "args.eval_prompts: no effect, the run has no evaluations; set"),
    ],
)
def test_keys_without_effect_are_named(
    word: str, line: str, pipelines: Pipelines, data: Path, answer, capsys: pytest.CaptureFixture
) -> None:
    """The dry run lists them, and the log of a run has a line for each of the command line."""
    words = ["train", str(pipelines.path("5b")), "--data", str(data)]
    words += word.format(data=data).split()
    key, _, why = line.partition(": no effect, ")
    assert f"{key} is accepted and not used: {why}" in answer(*words, "--dry-run")
    request = parse_train(words[1:])
    config = load_config(request.base, request.overrides, settings=request.settings)
    log_unused(config.unused, config.run.sections["args"], config.origins)
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("part", ["vae", "tokenizer", "text_encoder/config.json"])
def test_a_download_that_was_interrupted_is_named(
    part: str, pipelines: Pipelines, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Before the run's folder is made, and not where encoders are not needed."""
    folder = tmp_path / "model"
    shutil.copytree(pipelines.path("5b"), folder)
    gone = folder / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    words = [folder, "--data", data, "--out", tmp_path / "runs"]
    line = f"{folder}: has no {part}<...>as after a download that was interrupted; repeat it: hf download"
    assert_command_refused(capsys, ["train", *words], line)
    assert not (tmp_path / "runs").exists()
    assert main(["plan", str(folder), "--gpu", "h100-80"]) == 0
