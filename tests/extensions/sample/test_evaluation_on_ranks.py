"""A stop or an error of one rank in an evaluation: all ranks leave the same work out, and none waits."""

import json
from pathlib import Path

import pytest

from tests.support.ranks.evaluation_ranks import CASES
from tests.support.ranks.forked import run_forked
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, free_port, write_clips_with_vae

TENSOR = "args.model_parallel_size=2"
SECONDS = 300  # on a busy machine; a hang has no end
LAYOUTS = {
    "dp 2": (2, []),
    "tp 2": (2, [TENSOR]),
    "dp 2, zero-3": (2, ["deepspeed.zero_optimization.stage=3"]),
    "dp 2 x tp 2": (4, [TENSOR]),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the VAE, which chooses how it encodes clips at the first one, and without a cache."""
    folder = tmp_path_factory.mktemp("ranks")
    data = write_clips_with_vae(folder / "data", 4, CHANNELS)
    run = Run(data, folder).with_vae().with_args(valid_data=[str(data)], eval_at_start=True)
    return run.with_args(eval_iters=2, eval_batch_size=1, eval_sampling_steps=1).base


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.soak
def test_ranks_stop_and_fail_together(layout: str, base: Path, tmp_path: Path) -> None:
    processes, words = LAYOUTS[layout]
    has_model = any("parallel" in word for word in words)
    cache = str(tmp_path / "cache") if processes == 2 else ""
    # Two for each model: after the first, there is a video to leave out.
    videos = 2 * (processes // 2 if has_model else processes)
    words = [*words, f"args.eval_num_samples={videos}"]
    words = [f"args.save={tmp_path}", "deepspeed.train_micro_batch_size_per_gpu=1", *words]
    program = ["tests/support/ranks/evaluation_ranks.py", str(base), str(tmp_path / "out"), cache]
    done = run_forked([*program, *words], processes, free_port(), SECONDS)
    assert done.returncode == 0, done.stdout
    seen = json.loads((tmp_path / "out").read_text())
    assert len(seen) == len(CASES)
    for case, of_ranks in seen.items():
        assert all(found == of_ranks[0] for found in of_ranks), case
        losses, num_videos = of_ranks[0]
        name = case.partition(" on ")[0]
        in_losses = name not in ("none", "stop in the samples", "error in the conditioning")
        assert bool(losses) != in_losses, case
        in_samples = name in ("stop in the samples", "stop in the held-out loss")
        in_samples |= name in ("error in the conditioning", "error in a caption")
        assert (num_videos < videos) == in_samples, case
    if has_model and processes == 2:
        assert "alone: rank 1 failed in work that ranks do together" in done.stdout
        assert "lost: " in done.stdout
