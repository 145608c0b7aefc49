"""args.fit=auto: its changes make the run fit, cost little, and do not change what is trained."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.schema.arguments import TrainArguments
from cogfast.train.memory import fit as fit_module
from cogfast.train.memory.fit import FittedConfig, fit_to_memory
from cogfast.train.plan import out_of_memory
from cogfast.train.plan.activations import MARGIN
from cogfast.train.plan.memory import GIB, gap_bytes, host_parts, plan_memory, setup_of, usable
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import ROOT, losses, run_folder, write_clips, write_config

FILES = [ROOT / "configs" / name for name in ("cogvideox_5b.yaml", "lora.yaml", "sft.yaml")]
CACHED = "args.latent_cache=cache"
NONE = "args.activation_checkpointing=none"
BATCH = "deepspeed.train_micro_batch_size_per_gpu=4"


def fitted(gib: float, *words: str) -> FittedConfig:
    config = load_config(FILES, ["args.train_data=[clips]", "args.fit=auto", CACHED, *words])
    return fit_to_memory(config, TrainArguments.from_config(config), 1, int(gib * GIB))


def test_a_run_that_fits_is_not_changed() -> None:
    found = fitted(141, "args.activation_checkpointing=full")
    assert found.plan.fits and not found.fitted.changes


def test_the_changed_configuration_takes_what_was_planned() -> None:
    """The plan of the changed configuration, made from nothing, equals the one that was compared."""
    costs = []
    for gib in (141, 60, 40, 24):
        found = fitted(gib, BATCH, NONE)
        assert found.plan.fits and found.fitted.changes, gib
        again = plan_memory(setup_of(found.config, found.args, 1), found.plan.card)
        assert again.peak == pytest.approx(found.plan.peak, rel=0.001) and again.fits
        samples = found.args.batch_size * found.args.gradient_accumulation_steps
        assert samples == 4
        made = found.fitted.changes
        costs.append((any(change.rounds for change in made), sum(change.cost for change in made)))
    assert costs == sorted(costs), "a smaller card never costs less"


def test_no_cheaper_single_change_fits() -> None:
    """Less recomputation than the chosen one does not fit."""
    card = 60
    found = fitted(card, NONE)
    # The frozen base waits in host memory, so that fewer blocks recompute.
    words = ["args.activation_checkpointing=auto", "args.offload_blocks=42"]
    assert sorted(found.fitted.words) == words
    setup = setup_of(found.config, found.args, 1)
    policies = found.plan.policies
    kept_more = tuple(sorted(policies, key=lambda policy: policy == "none"))
    assert kept_more == policies, "the last blocks keep the most"
    first = policies.count(policies[0])
    more = (*policies[: first - 1], policies[-1], *policies[first:])
    peak = plan_memory(setup, int(card * GIB), more).peak
    assert peak + gap_bytes(setup) > usable(int(card * GIB))


def test_nothing_fits(capsys: pytest.CaptureFixture) -> None:
    found = fitted(5)
    assert not found.plan.fits and found.fitted.plan.peak <= found.plan.peak
    assert found.config.origins.get("args.activation_checkpointing") != "args.fit=auto"
    words = ["--gpu", "5", "args.train_data=[clips]", "args.fit=auto", CACHED]
    assert main(["plan", "--base", *map(str, FILES), *words]) == 0
    assert "it does not fit" in capsys.readouterr().out


def test_the_plan_names_the_changes(capsys: pytest.CaptureFixture) -> None:
    words = ["--gpu", "40", "args.train_data=[clips]", "args.fit=auto", CACHED, NONE]
    assert main(["plan", "--base", *map(str, FILES), *words]) == 0
    printed = capsys.readouterr().out
    assert "it fits." in printed and "args.fit=auto: args." in printed


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
    monkeypatch.setattr(fit_module, "free_memory", lambda device: (card, card))
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
    monkeypatch.setattr(fit_module, "free_memory", lambda device: (2**20, 2**20))
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
    assert parts["EMA"] == 4 * plan.setup.model.num_trained and parts["blocks"] == 0


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
