"""Precision and layout of the data, where a configuration leaves them open, come from the weights and paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.train.assembly import assemble_datasets
from cogfast.train.preflight.check import check_train
from cogfast.train.preflight.inferred import infer_layout, infer_precision
from cogfast.train.run.folder import check_changes, plain_sections
from tests.model.weights.test_weights_load import sat_state, save_sat
from tests.support.tiny_run import write_clips, write_config
from tests.support.tiny_transformers import tiny

CONFIGURED = {
    "nothing": ([], "bf16"),
    "fp32": (["deepspeed.bf16.enabled=false"], "fp32"),
    "fp32, in args": (["args.bf16=false"], "fp32"),
    "fp16": (["deepspeed.fp16.enabled=true"], "fp16"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    for dtype in (torch.bfloat16, torch.float32):
        state = sat_state(tiny("5b", seed=1).to(dtype))
        save_sat(folder / str(dtype).removeprefix("torch."), {"module": state})
    return write_config(folder / "base.yaml", folder / "data")


@pytest.mark.parametrize("case", CONFIGURED)
def test_a_configured_precision_is_kept(base: Path, case: str) -> None:
    arguments, precision = CONFIGURED[case]
    config = load_config([base], [f"args.load={base.parent / 'bfloat16'}", *arguments])
    infer_precision(config)
    assert TrainArguments.from_config(config).precision == precision


def test_other_weights_leave_float32(base: Path) -> None:
    for load in ([], ["args.load=nowhere"], [f"args.load={base.parent / 'float32'}"]):
        config = load_config([base], load)
        infer_precision(config)
        assert TrainArguments.from_config(config).precision == "fp32"


def test_it_is_no_change_when_a_run_resumes(base: Path) -> None:
    config = load_config([base], [f"args.load={base.parent / 'bfloat16'}"])
    infer_precision(config)
    sections = plain_sections(config)
    assert sections["args"]["bf16"] and sections["deepspeed"]["bf16"]["enabled"]
    check_changes(Path("checkpoint"), {"config": sections, "global_batch": 4}, config, 4)


def test_a_dry_run_shows_it(base: Path, capsys: pytest.CaptureFixture) -> None:
    load = f"args.load={base.parent / 'bfloat16'}"
    assert main(["train", "--base", str(base), "--dry-run", load]) == 0
    text = capsys.readouterr().out
    after = text[text.rindex("  bf16:") :].splitlines()[1]
    assert after.split() == ["enabled:", "true", "#", "args.load"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips without labels, listed in a table and in lists, each in a folder of its own."""
    folder = write_clips(tmp_path_factory.mktemp("clips"), num_clips=2)
    rows = [f"{folder}/videos/{i}.mp4" for i in range(2)]
    table = "path,caption\n" + "".join(f"{row},a bar\n" for row in rows)
    files = {
        "clips.csv": table,
        "table/metadata.csv": table,
        "lists/videos.txt": "\n".join(rows),
        "lists/prompts.txt": "a bar\na bar\n",
    }
    for name, text in files.items():
        for place in {name, f"both/{Path(name).name}"} if "/" in name else {name}:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("source", "layout"),
    [(".", "SFTDataset"), ("clips.csv", "VideoManifest"), ("table", "VideoManifest")]
    + [("lists", "VideoList")],
)
def test_the_layout_follows_from_the_path(clips: Path, source: str, layout: str) -> None:
    """The models' files name SAT's folders of videos and labels, whose defaults stay."""
    words = [f"args.train_data=[{clips / source}]"]
    base = write_config(clips / "base.yaml", clips)
    config = infer_layout(load_config([base], words))
    assert config.data.target.endswith(f".{layout}")
    check_train(config)
    train = assemble_datasets(config, TrainArguments.from_config(config)).train
    assert len(train) == 2
    assert train.settings.skip_frms_num == 3


def test_a_source_of_several_layouts_is_refused(clips: Path) -> None:
    base = write_config(clips / "base.yaml", clips)
    config = load_config([base], [f"args.train_data=[{clips / 'both'}]"])
    message = r"args.train_data=.*both: has the layouts of several data sets; set data.target=\S+."
    with pytest.raises(ValueError, match=message + r"VideoManifest or data.target=\S+.VideoList$"):
        infer_layout(config)


def test_a_layout_of_the_command_line_stays(clips: Path) -> None:
    base = write_config(clips / "base.yaml", clips)
    words = [f"args.train_data=[{clips / 'clips.csv'}]", "data.target=data_video.SFTDataset"]
    config = infer_layout(load_config([base], words))
    with pytest.raises(ValueError, match=r"clips.csv is a file; give folders .*VideoManifest"):
        check_train(config)
