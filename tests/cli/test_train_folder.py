"""cogfast train, plan and cache FOLDER --data PATH: compared with the YAML files that a dry run prints."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.cli.options import parse_cache, parse_plan, parse_train
from tests.support.pipelines import Pipelines
from tests.support.refusals import Refusal, assert_line, refusals
from tests.support.tiny_run import losses, run_folder

SHORT = ("args.train_iters=2", "args.warmup_steps=0", "args.log_interval=1", "args.num_workers=0")


def losses_of(save: Path) -> list[float]:
    return losses(run_folder(save))


@pytest.mark.parametrize("lora", [4, None], ids=["LoRA", "all weights"])
def test_a_run_without_yaml_is_that_of_the_printed_configuration(
    lora: int | None,
    tmp_path: Path,
    pipelines: Pipelines,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", str(pipelines.path("5b")), "--data", str(data), "--out", "runs", *SHORT]
    words += [] if lora is None else ["--lora", str(lora)]
    assert main(words) == 0
    found = losses_of(tmp_path / "runs")
    assert len(found) == 2
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    Path("kept.yaml").write_text(capsys.readouterr().out)
    assert main(["train", "--base", "kept.yaml", "args.save=again"]) == 0
    assert losses_of(tmp_path / "again") == found
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
    assert (trained in (run_folder(tmp_path / "runs") / "log.txt").read_text()) == bool(lora)


def test_plan_and_cache_take_the_words_of_train(
    tmp_path: Path,
    pipelines: Pipelines,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(pipelines.path("5b")), "--data", str(data), "--lora", "4", "args.batch_size=2"]
    assert main(["train", *words, "--dry-run"]) == 0
    Path("kept.yaml").write_text(capsys.readouterr().out)
    plans = []
    for given in (words, ["--base", "kept.yaml"]):
        assert main(["plan", *given, "--gpu", "h100-80", "--gpus", "2"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] and "on: 2 GPUs" in plans[0]
    assert parse_cache(words)[0] == parse_plan(words)[0] == parse_train(words)
    assert main(["cache", *words, "args.latent_cache=cache"]) == 0
    assert "cache: 6 samples, 0 bad" in capsys.readouterr().err
    # A plan reads no data, so that they may be left out.
    request, *_ = parse_plan([*words[:1], *words[3:]])
    assert request.settings.items() < parse_train(words).settings.items()


@refusals(Path(__file__).with_name("refusals.txt"), "train")
def test_mistakes_end_in_one_line(
    refusal: Refusal,
    pipelines: Pipelines,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    Path("none.csv").write_text("path,caption\na.mp4,x\nb.mp4,y\n")
    refusal = refusal.fill(data=data, **{"5b": pipelines.path("5b")})
    assert main(["train", *refusal.words]) == 2
    *logged, line = capsys.readouterr().err.splitlines()
    assert_line(line, refusal.line)
    assert not logged or "none.csv: 2 of 2 rows name a file that does not exist" in logged[-1]
