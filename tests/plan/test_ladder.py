"""args.fit=auto: its changes make the run fit, cost little, and do not change what is trained."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.plan import ladder, out_of_memory
from cogfast.plan.gpus import parse_gpu
from cogfast.plan.ladder import Fitted, climb
from cogfast.plan.memory import GIB, MARGIN, host_parts, plan_memory, setup_of, usable
from cogfast.plan.zero import num_trained
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import ROOT, losses, run_folder, write_clips, write_config

FILES = [ROOT / "configs" / name for name in ("cogvideox_5b.yaml", "lora.yaml", "sft.yaml")]
CACHED = "args.latent_cache=cache"
NONE = "args.activation_checkpointing=none"
BATCH = "deepspeed.train_micro_batch_size_per_gpu=4"


def fitted(
    gib: float, *words: str, lora: bool = True, ranks: int = 1, gpus: bool = False
) -> Fitted:
    files = FILES if lora else [FILES[0], FILES[2]]
    config = load_config(files, ["args.train_data=[clips]", "args.fit=auto", *words])
    args = TrainArguments.from_config(config)
    plan = plan_memory(setup_of(config, args, ranks), int(gib * GIB))
    return climb(config, args, plan, has_gpus=gpus)


def test_a_run_that_fits_is_not_changed() -> None:
    found = fitted(141, CACHED, "args.activation_checkpointing=full")
    assert found.plan.fits and not found.changes


@pytest.mark.parametrize("lora", [True, False])
def test_the_changed_configuration_takes_what_was_planned(lora: bool) -> None:
    """The plan of the changed configuration, made from nothing, equals the one that was compared."""
    seen = []
    for gib in (60, 40, 24, 12) if lora else (141, 100):
        found = fitted(gib, CACHED, BATCH, NONE, lora=lora)
        assert found.plan.fits and found.changes, gib
        again = plan_memory(setup_of(found.config, found.args, 1), found.plan.card)
        assert again.peak == found.plan.peak <= usable(int(gib * GIB))
        assert found.args.batch_size * found.args.gradient_accumulation_steps == 4
        seen.append(found)
    assert [len(found.changes) for found in seen] == sorted(len(f.changes) for f in seen)


def test_no_change_is_made_in_vain() -> None:
    """Without any one of the changes the run does not fit."""
    words = [CACHED, BATCH, NONE]
    found = fitted(12, *words)
    assert len(found.changes) >= 3
    for change in found.changes:
        others = [word for each in found.changes if each != change for word in each.split()]
        config = load_config(FILES, ["args.train_data=[clips]", *words[:1], NONE, BATCH, *others])
        plan = plan_memory(setup_of(config, TrainArguments.from_config(config), 1), found.plan.card)
        assert not plan.fits, change


def test_more_gpus_come_last() -> None:
    """Only where the plan may name them, since a run cannot add them."""
    found = fitted(40, CACHED, lora=False, gpus=True)
    assert found.plan.fits and found.changes[-1].endswith(" GPUs")
    without = fitted(40, CACHED, lora=False)
    assert not without.plan.fits and not any("GPUs" in change for change in without.changes)


def test_nothing_fits(capsys: pytest.CaptureFixture) -> None:
    found = fitted(2, CACHED)
    assert not found.plan.fits
    words = ["--gpu", "2", "args.train_data=[clips]", "args.fit=auto", CACHED]
    assert main(["plan", "--base", *map(str, FILES), *words]) == 0
    assert "it does not fit" in (text := capsys.readouterr().out)
    assert "No change that is tried makes it fit" in text and "args.fit=auto" not in text


def test_the_plan_names_the_changes(capsys: pytest.CaptureFixture) -> None:
    words = ["--gpu", "40", "args.train_data=[clips]", CACHED, NONE]
    assert main(["plan", "--base", *map(str, FILES), *words]) == 0
    assert "\n  args.activation_checkpointing=auto\n" in capsys.readouterr().out
    assert main(["plan", "--base", *map(str, FILES), *words, "args.fit=auto"]) == 0
    printed = capsys.readouterr().out
    assert "it fits." in printed
    assert "args.fit=auto: args.activation_checkpointing=auto\n" in printed


def test_a_model_that_does_not_fit_has_a_way(capsys: pytest.CaptureFixture) -> None:
    """Full training of 5B on one H100, clips encoded in each step."""
    files = [str(FILES[0]), str(FILES[2])]
    assert main(["plan", "--base", *files, "--gpu", "h100-80", "args.train_data=[clips]"]) == 0
    printed = capsys.readouterr().out
    assert "it does not fit" in printed and "This makes it fit (" in printed
    assert parse_gpu("h100-80")[1] == int(79.1 * GIB)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"))


def trained(folder: Path, clips: Path, fit: str = "none") -> list[float]:
    base = write_config(folder / "base.yaml", clips, train_iters=2, fit=fit)
    Trainer(load_config([base])).train()
    return losses(run_folder(folder / "runs"))


def test_a_run_makes_the_changes_and_trains_as_before(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(tmp_path / "plain", clips)
    plain = load_config([tmp_path / "plain" / "base.yaml"])
    args = TrainArguments.from_config(plain)
    # A little less than the run may use.
    card = int((plan_memory(setup_of(plain, args, 1), None).peak - 2**12) / (1 - MARGIN))
    monkeypatch.setattr(ladder, "free_memory", lambda device: (card, card))
    with caplog.at_level(logging.INFO, logger="cogfast"):
        assert trained(tmp_path / "fitted", clips, fit="auto") == pytest.approx(expected, rel=1e-5)
    lines = [r.getMessage() for r in caplog.records if "args.fit=auto" in r.getMessage()]
    assert len(lines) >= 2 and lines[-1].startswith("args.fit=auto: fits: ")
    # The run's folder has the changes, so that a resumed run begins with them.
    saved = load_config([run_folder(tmp_path / "fitted" / "runs") / "training_config.yaml"])
    assert plan_memory(setup_of(saved, TrainArguments.from_config(saved), 1), card).fits


def test_a_run_that_cannot_fit_ends_in_one_line(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "free_memory", lambda device: (2**20, 2**20))
    with pytest.raises(ValueError, match=r"args.fit=auto: the run takes .* use more GPUs, fewer"):
        trained(tmp_path, clips, fit="auto")


def test_the_plan_counts_what_waits_in_host_memory() -> None:
    words = ["args.train_data=[clips]", CACHED, "args.offload_blocks=42"]
    config = load_config(FILES, words)
    plan = plan_memory(setup_of(config, TrainArguments.from_config(config), 1), None)
    m = 3072  # width; qkv, output, fc1, fc2 and the modulation of a block
    linears = m * 3 * m + m * m + 2 * m * 4 * m + 512 * 12 * m
    assert host_parts(plan.setup, plan.policies)["blocks"] == 42 * 2 * linears
    full = load_config([FILES[0], FILES[2]], [*words[:2], "args.ema_device=cpu"])
    plan = plan_memory(setup_of(full, TrainArguments.from_config(full), 1), None)
    parts = host_parts(plan.setup, plan.policies)
    assert parts["EMA"] == 4 * num_trained(plan.setup.transformer) and parts["blocks"] == 0


def test_a_machine_with_too_little_memory_for_its_ranks_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SimpleNamespace(total=64 * GIB)
    monkeypatch.setattr(out_of_memory.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    out_of_memory.warn_of_host_memory({"blocks": 5 * GIB, "EMA": 2 * GIB})
    assert not caplog.records
    out_of_memory.warn_of_host_memory({"blocks": 8 * GIB, "EMA": 2 * GIB})
    text = caplog.records[0].getMessage()
    assert "8 ranks" in text and "80.0 GiB" in text and "blocks 8.0, EMA 2.0" in text
