"""The arguments of `cogfast train` and `cogfast sample`, exit statuses, and upstream's scripts."""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cogfast.__main__ import _COMMANDS, main
from cogfast.cli.options import parse_sample, parse_train, read_prompts
from cogfast.distributed.lost_ranks import OTHER_RANK
from tests.support.refusals import assert_command_refused, assert_refused, refusals
from tests.support.runs import run_of
from tests.support.tiny_run import ROOT


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    words = list(map(str, arguments))
    return subprocess.run(words, env=env, capture_output=True, text=True, cwd=ROOT)


def train_arguments(sat_configs: Path, *arguments: str) -> list[str]:
    files = [str(sat_configs / f"{name}.yaml") for name in ("cogvideox_2b", "sft")]
    return ["--base", *files, *arguments]


def test_sats_flags_become_overrides(sat_configs):
    flags = shlex.split(
        "--train-iters 10 --bf16 --save-interval 5 --load 'some: where' --train-data a b "
        "--experiment-name 7 --no-load-rng --lr 1e-4 --seed 3 --resume auto --local_rank 0 --zero_stage 1"
    )
    request = parse_train(train_arguments(sat_configs, *flags))
    config = run_of(*request.base).config(*request.overrides)
    args = config.args
    assert (args.train_iters, args.bf16, args.save_interval) == (10, True, 5)
    assert (args.load, args.train_data, args.experiment_name) == ("some: where", ["a", "b"], "7")
    assert (args.lr, args.seed, args.resume, args.zero_stage) == (1e-4, 3, "auto", 1)
    assert config.origins["args.train_iters"] == "command line"
    assert {"args.no_load_rng", "args.local_rank"} <= set(config.unused)


@pytest.mark.parametrize(
    "arguments",
    [
        "--base {0} {1} args.seed=5 --dry-run data.params.fps=4",
        "--dry-run data.params.fps=4 args.seed=5 --base {0} {1}",
        "--train-data x data.params.fps=4 --base {0} {1} args.seed=5 --dry-run",
    ],
)
def test_overrides_may_come_anywhere(sat_configs, arguments):
    files = [str(sat_configs / f"{name}.yaml") for name in ("cogvideox_2b", "sft")]
    request = parse_train(arguments.format(*files).split())
    assert request.base == files
    assert request.dry_run
    assert {"args.seed=5", "data.params.fps=4"} <= set(request.overrides)


TABLE = Path(__file__).with_name("refusals.txt")


@refusals(TABLE, "train 2b and sft")
def test_wrong_arguments(sat_configs, capsys, refusal):
    words = ["train", *train_arguments(sat_configs, *refusal.words)]
    assert_command_refused(capsys, words, refusal.line)


@refusals(TABLE, "beside a model and videos")
def test_words_that_spaces_have_cut(refusal, here, capsys):
    (here / "model").mkdir()
    (here / "model" / "model_index.json").touch()
    (here / "my_videos").mkdir()
    assert_command_refused(capsys, refusal.words, refusal.line)


@refusals(TABLE, "in an empty folder")
def test_words_that_are_wrong_leave_nothing(refusal, here, capsys):
    assert_command_refused(capsys, refusal.words, refusal.line)
    assert not [*here.iterdir()]


OF_ONE_RUN = {
    "sample {} --prompt x": "cogfast sample runs/b --prompt x",
    "convert {} out --to peft": "cogfast convert runs/b out --to peft",
    "publish {} me/my-lora": "cogfast publish runs/b me/my-lora",
    "report {} --out page.html": "cogfast report runs/b --out page.html",
}
NO_RUN = {
    "runs": "runs is a folder of runs, and no run",
    "runs/missing": "runs/missing: no such file or folder",
    "missing": "missing: no such file or folder",
    "runs/a runs/b runs/c": "takes one run, but 3 are given",
}


# A report takes several runs.
PAIRS = [(c, g) for c in OF_ONE_RUN for g in NO_RUN if not (c.startswith("report") and " " in g)]


@pytest.mark.parametrize(("command", "given"), PAIRS)
def test_a_run_that_is_none_is_answered_with_the_newest(command, given, here, capsys):
    for name, time in (("a", 2), ("b", 3), ("c", 1)):
        (here / "runs" / name).mkdir(parents=True)
        file = here / "runs" / name / "training_config.yaml"
        file.touch()
        os.utime(file, (time, time))
    line = f"{NO_RUN[given]}; the runs, newest first, are runs/b, runs/a, runs/c; <...>"
    line += f"for the newest write {OF_ONE_RUN[command]}$"
    assert_command_refused(capsys, command.format(given).split(), line)


def test_dry_run_does_not_refuse_placeholders(sat_configs, capsys):
    """It says that a run would."""
    arguments = train_arguments(sat_configs, "--dry-run", "args.train_iters=7")
    assert main(["train", *arguments]) == 0
    text, err = capsys.readouterr()
    assert "cogfast: a run would end with: sft.yaml: args.load='{your CogVideoX SAT" in err
    assert "load: '{your CogVideoX SAT folder}/transformer'" in text
    line = next(t for t in text.splitlines() if t.startswith("  train_iters: 7"))
    assert line.endswith("# command line")
    assert main(["train", *arguments[:-2]]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert any("is a placeholder of upstream's file" in line for line in refused)
    assert err.replace("a run would end with: ", "").splitlines() == refused
    # The check would ask the store, and try to write there.
    assert main(["train", *arguments, "args.save=s3://bucket/runs"]) == 0
    line = "cogfast: the run is not checked, since it has s3://bucket/runs\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("load", [(), ("args.load=CogVideoX-5bb",)], ids=["placeholder", "typo"])
def test_weights_that_are_missing_hide_what_their_folder_would_settle(load, capsys):
    """VAE and text encoder come from the folder of args.load, so that it alone is asked for."""
    assert main(["train", "--base", "cogvideox_5b.yaml", "sft.yaml", *load]) == 2
    first, *more = capsys.readouterr().err.splitlines()
    assert "args.load=" in first
    assert load or first.endswith("(args.load=PATH), a folder with VAE and text encoder")
    assert len(more) == 1 and "args.train_data" in more[0]


def test_errors_of_other_packages_keep_their_traceback(sat_configs, tmp_path, monkeypatch):
    (tmp_path / "broken_clips.py").write_text("raise ValueError('mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--allow-import", "broken_clips", "data={target: broken_clips.X, params: null}"]
    with pytest.raises(ValueError, match="mine"):
        main(["train", *train_arguments(sat_configs, *arguments)])
    words = ["train", "--base", "nothing.yaml", "--traceback"]
    assert_refused(lambda: main(words), "--base nothing.yaml: no such file")


def test_exit_status_and_one_line_from_rank_0_only(capsys, monkeypatch):
    """Under a launcher the other ranks wait, so that torchrun ends them before they repeat it."""
    arguments = [sys.executable, "-m", "cogfast", "train", "--base", "nothing.yaml"]
    alone = run(*arguments, RANK="0", WORLD_SIZE="2")
    assert alone.returncode == 2
    text = "--base nothing.yaml: no such file; give the path of a YAML file"
    assert alone.stderr == f"cogfast: {text}\n"
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("cogfast.__main__.time.sleep", waited.append)
    assert_command_refused(capsys, arguments[3:], f"^cogfast: rank 1: {text}$")
    assert waited == [3]


def test_a_connection_that_breaks_in_cogfasts_own_call_is_of_another_rank(capsys, monkeypatch):
    """gloo raises in C++, so that the last frame of the traceback is the caller's."""
    lost = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
    calls = {"__name__": "cogfast.distributed.fused_step", "lost": lost}
    exec("def train(argv): raise RuntimeError(lost)", calls)
    monkeypatch.setitem(_COMMANDS, "train", calls["train"])
    monkeypatch.setattr("cogfast.__main__.time.sleep", lambda seconds: None)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == f"cogfast: {OTHER_RANK} (Connection closed by peer [::1]:1)\n"


def test_help_imports_nothing_slow():
    shown = run(sys.executable, "-m", "cogfast", "--help")
    assert shown.returncode == 0
    assert "cogfast train --base model.yaml sft.yaml" in shown.stdout
    code = "import sys, cogfast.__main__, cogfast.cli.options; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout == "False\n"


def test_the_finetune_scripts_pass_arguments_on(tmp_path, sat_configs):
    base = f"{sat_configs / 'cogvideox_2b.yaml'} {sat_configs / 'sft.yaml'}"
    # torchrun and python are replaced by a script that shows its arguments
    for name in ("torchrun", "python"):
        fake = tmp_path / name
        fake.write_text('#! /bin/bash\necho "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-}" "$@"\n')
        fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = {"BASE": base, "NPROC": "3", "SEED": "5", "PATH": path}
    passed = f"train_video.py --base {base} --seed 5 args.train_iters=77\n"
    many, one = (
        run(ROOT / f"scripts/finetune_{name}.sh", "args.train_iters=77", **given)
        for name in ("multi_gpus", "single_gpu")
    )
    assert "600 --standalone --nproc_per_node=3 --signals-to-handle=SIGTERM" in many.stdout
    assert passed in many.stdout and passed in one.stdout


def make_run(folder: Path) -> Path:
    run_folder = folder / "runs" / "x-2026-01-01-00-00-00"
    (run_folder / "checkpoints" / "40").mkdir(parents=True)
    (run_folder / "training_config.yaml").write_text("args: {seed: 9, output_dir: here}\n")
    return run_folder


def test_sample_reads_a_run_or_one_of_its_checkpoints(tmp_path):
    run_folder = make_run(tmp_path)
    for source in (run_folder, run_folder / "checkpoints" / "40"):
        request = parse_sample([str(source), "--prompt", "a=b", "--prompt", "c", "args.seed=3"])
        assert request.base == [str(run_folder / "training_config.yaml")]
        assert request.weights == str(source)
        assert request.ema is None
        assert request.prompts == ["a=b", "c"]
        assert request.overrides[-1] == "args.seed=3"
    assert parse_sample([str(run_folder), "--prompt", "x", "--no-ema"]).ema is False
    assert parse_sample(["--base", "m.yaml", "--prompt", "x"]).ema is None
    words = [str(tmp_path), "--prompt", "x"]  # neither a run nor a model
    assert_refused(lambda: parse_sample(words), f"{tmp_path}:")
    words = [str(run_folder), "--prompt", "x", "--prompt-file", "y"]
    assert_refused(lambda: parse_sample(words), "--prompt and --prompt-file are both given")
    (tmp_path / "list.txt").write_text("a dog")
    request = parse_sample([str(run_folder), "--prompt", f"{tmp_path}/list.txt"])
    assert_refused(
        lambda: read_prompts(request, None), "list.txt: is a file; give it with --prompt-"
    )


def test_a_runs_file_does_not_say_what_is_read_or_where_to_write(tmp_path, answer):
    def rows(*words: object) -> set[str]:
        shown = answer("sample", *words, "--dry-run").splitlines()
        return {line.partition("#")[0].strip() for line in shown}

    own = "{output_dir: /outside, input_type: txt, input_file: /etc/passwd}"
    run_folder = make_run(tmp_path)
    (run_folder / "training_config.yaml").write_text(f"args: {own}\n")
    expected = {"output_dir: samples", "input_type: cli", "input_file: input.txt"}
    assert expected <= rows(run_folder)
    given = ["args.output_dir=mine", "args.input_type=txt", "args.input_file=mine.txt"]
    expected = {"output_dir: mine", "input_type: txt", "input_file: mine.txt"}
    assert expected <= rows(run_folder, *given)
    # A file that the user names is not a run's.
    assert "output_dir: /outside" in rows("--base", run_folder / "training_config.yaml")


def test_prompts_from_arguments_files_and_the_terminal(tmp_path, monkeypatch):
    image = tmp_path / "dog.png"
    image.touch()
    file = tmp_path / "prompts.txt"
    file.write_text(f"a cat\n\na dog@@{image}\n")
    run_folder = str(make_run(tmp_path))
    args = run_of().config(f"args.input_file={file}", "args.input_type=txt").args

    def asked(*words: str) -> tuple:
        prompts, files = read_prompts(parse_sample([run_folder, *words]), args)
        return prompts, files["image"]

    assert asked() == (["a cat", "a dog"], [None, image])
    assert asked("--prompt-file", str(file)) == (["a cat", "a dog"], [None, image])
    assert asked("--prompt", "x") == (["x"], [None])
    both = ["--prompt", "x", "--prompt", "y", "--image", str(image)]
    assert asked(*both) == (["x", "y"], [image, image])
    file.write_text("\n\n")
    given = f"--prompt-file={tmp_path}"
    for words, line in (
        ((*both, "--image", str(image), "--prompt", "z"), "--image names 2 files for 3 prompts"),
        (("--prompt", "x", "--image", "none.png"), "--image none.png: no such file"),
        (("--prompt-file", "none.txt"), "--prompt-file=none.txt: no such file"),
        (("--prompt-file", str(tmp_path)), f"{given}: is a folder; give --prompt TEXT or"),
        (("--prompt-file", str(file)), f"--prompt-file={file}: there is no prompt; give"),
    ):
        assert_refused(lambda words=words: asked(*words), line)
    file.write_bytes("a cat".encode("utf-8-sig"))
    assert asked("--prompt-file", str(file)) == (["a cat"], [None])
    file.write_bytes("ein Kätzchen".encode("latin-1"))
    line = "not UTF-8; save the prompts as UTF-8"
    assert_refused(lambda: asked("--prompt-file", str(file)), line)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed\n")))
    prompts, files = read_prompts(parse_sample([run_folder]), run_of().config().args)
    assert (prompts, files["image"]) == (["typed"], [None])
