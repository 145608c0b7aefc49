"""A fault on one of several ranks is named first, with its rank and place, whatever the ranks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cogfast.data.global_order import GlobalOrder
from tests.support.tiny_run import launch_ranks, losses, write_clips, write_config
from tests.train.run.health.test_nonfinite import BATCH, NUM_SAMPLES, SEED, one_bad

WEIGHT, FROZEN = "blocks.3.fc1.weight", "blocks.3.attention.out.original.weight"
BAD = GlobalOrder(NUM_SAMPLES, SEED, BATCH).index(0, 3)  # read by the last data rank in step 1
_MICRO = "deepspeed.train_micro_batch_size_per_gpu=2"
_ZERO = "deepspeed.zero_optimization"
_SHARDED = f"{_ZERO}.stage3_param_persistence_threshold=0"
_LORA = "model.network_config.params.modules.lora_config"
LAYOUTS = {
    "zero-3": (_MICRO, f"{_ZERO}.stage=3", _SHARDED),
    "zero-3, small parameters whole": (_MICRO, f"{_ZERO}.stage=3"),
    "tp": ("args.model_parallel_size=2",),
    "tp, rows split": ("args.model_parallel_size=2", "args.sequence_parallel=true"),
    "cp": ("args.context_parallel_size=2",),
}
CASES = [(layout, fault) for layout in LAYOUTS for fault in (WEIGHT, "gradient", "sample")]
CASES.append(("zero-3", FROZEN))
# All ranks find the fault at once: ZeRO gathers the weight, and the bias's gradient is a sum over them.
TIED = (("cp", WEIGHT), ("tp, rows split", "gradient"))
QUICK = (
    ("zero-3", WEIGHT),
    ("zero-3", "gradient"),
    ("tp, rows split", WEIGHT),
    ("cp", "gradient"),
)
# One run skips the bad step, and one has ZeRO-2.
SKIPPED = ("zero-3", "zero-2")


def words_of(case: tuple[str, str], folder: Path) -> list[str]:
    layout, fault = case
    words = ["args.nonfinite=stop", *LAYOUTS[layout]]
    if fault == "sample":
        words += [f"data.params.bad={BAD}"]
    if fault == FROZEN:
        lora = "sat.model.finetune.lora2.LoraMixin"
        words += [f"{_LORA}.target={lora}", f"{_LORA}.params.r=4"]
        words += ["model.not_trainable_prefixes=[all]", f"args.load={folder / 'base'}"]
    return words


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs that the chosen tests need."""
    folder = tmp_path_factory.mktemp("layouts")
    data = write_clips(folder / "data", num_clips=1)
    base = write_config(folder / "base.yaml", data, dataset=one_bad(-1), train_iters=1)
    items = [item for item in request.session.items if item.module is request.module]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [(each["layout"], each["fault"]) for each in calls]
    fault = {"sample": "none"}
    runs: dict[str, list[str]] = {}
    if any(case[1] == FROZEN for case in cases):
        runs["base"] = ["none", *LAYOUTS["zero-3"], "args.train_iters=2"]
    runs |= {
        "-".join(case): [fault.get(case[1], case[1]), *words_of(case, folder)] for case in cases
    }
    for name in SKIPPED:
        stage = LAYOUTS["zero-3"] if name == "zero-3" else (_MICRO,)
        runs[name] = ["none", *stage, f"data.params.bad={BAD}", "args.train_iters=3"]
    layers = "model.network_config.params.num_layers=4"
    runs = {name: [fault, layers, *words] for name, (fault, *words) in runs.items()}
    script = "tests/support/ranks/nonfinite_ranks.py"
    launch_ranks(2, script, str(base), str(folder), json.dumps(runs))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fault"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.soak) for c in CASES],
)
def test_the_rank_with_the_fault_comes_first(folder: Path, layout: str, fault: str) -> None:
    name = f"{layout}-{fault}"
    error = (folder / f"{name}.txt").read_text()
    is_one_model = layout.startswith(("tp", "cp"))
    found = error.partition("; not finite: ")[2]
    if fault == "sample":
        # All ranks of a model have read it.
        rank, place = int(not is_one_model), "the batch's encoded_videos (1 NaN of "
        assert f"samples: sample {BAD} at timestep " in error
    elif fault == "gradient":
        rank, place = int((layout, fault) not in TIED), "the gradient of "
        assert found.startswith((f"{place}the output of blocks.2", f"{place}blocks.2."))
        assert "; then " not in found
    else:
        rank, place = int((layout, fault) not in TIED), f"weights {fault} (1 inf of "
        assert f"; then {fault.removesuffix('.original.weight').removesuffix('.weight')}" in found
        assert "its weights are damaged and not saved" in error
    assert error.startswith(f"args.nonfinite=stop: step 1, rank {rank}: samples: ")
    assert found.startswith(place)
    # A model's batch is written by its first rank.
    written = {file.stem for file in (folder / name).glob("nonfinite/step-00000001/*.json")}
    assert f"rank-{0 if is_one_model else 1}-batch-0" in written


@pytest.mark.slow
def test_training_continues_after_an_inspection_under_zero_3(folder: Path) -> None:
    """Its losses are those of ZeRO-2; DeepSpeed's gathers follow the order of training again."""
    zero_3, zero_2 = (losses(folder / name) for name in SKIPPED)
    assert len(zero_3) == 3
    assert zero_3 == pytest.approx(zero_2, rel=1e-5)
