"""Addresses with secrets: no command prints or writes them, but into the private files of SECURITY.md."""

import io
import json
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.cli import streams
from cogfast.extensions.stores import store
from cogfast.model.weights.checkpoint_manifest import read_manifest, write_manifest
from tests.cli.hostile.web_server import WebServer, web_server
from tests.support import tiny_run
from tests.support.runs import Run
from tests.support.tiny_run import part

SECRET = "sEcReT" + "0123456789WoRd"  # not in changes.diff of this file
# A resume reads the configuration with the addresses as the user has written them.
PRIVATE = re.compile(r"training_config[\w-]*\.yaml|checkpoints/\d+/manifest\.json")
SIGNED = f"s3://bucket/a?X-Amz-Signature={SECRET}"
USERS = [f"s3://AKIA:{SECRET}@bucket/a", f"s3://{SECRET}:pass@bucket/a", SIGNED]
USERS += [f"http://127.0.0.1:1/a?token={SECRET}", f"S3://me:{SECRET}@bucket/a"]


def call(words: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its status, and what it prints."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text), redirect_stderr(text):
        patch.setattr("sys.argv", ["cogfast", *words])
        return main(words), text.getvalue()


def leaks(*folders: Path) -> list[str]:
    """The files below folders that have the secret, in their name or content, but for private ones."""
    found = []
    for file in (f for folder in folders for f in folder.rglob("*") if f.is_file()):
        has_secret = SECRET.encode() in file.read_bytes()
        is_private = stat.S_IMODE(file.stat().st_mode) == 0o600 and PRIVATE.search(str(file))
        if SECRET in str(file) or (has_secret and not is_private):
            found.append(str(file))
    return found


@pytest.fixture(scope="module")
def served(data: Path) -> Iterator[WebServer]:
    with web_server(data) as server:
        yield server


@pytest.fixture(scope="module")
def private(
    tmp_path_factory: pytest.TempPathFactory, served: WebServer, data: Path
) -> Iterator[tuple[Run, Path, str]]:
    """A run on signed addresses, one of them of a file that is no video; its home; what was printed."""
    root = tmp_path_factory.mktemp("private")
    home, own = root / "home", root / "own"
    home.mkdir()
    own.mkdir()
    (data / "bad.bin").write_bytes(b"no video" * 100)
    rows = [(f"videos/{i}.mp4", f"bar {i}") for i in range(5)] + [("bad.bin", "bad")]
    lines = [
        {"path": f"{served.address}/{name}?X-Amz-Signature={SECRET}{i}", "caption": text}
        for i, (name, text) in enumerate(rows)
    ]
    (own / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(data, own).with_manifest(own / "clips.jsonl").into(root / "runs")
    run = run.with_args(train_iters=2, save_interval=1, max_bad_fraction=0.5)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(home))
        patch.delenv("COGFAST_LOCAL_CACHE", raising=False)
        word = f"args.eval_images=[{SIGNED}]"
        status, printed = call(run.command("args.accept_changes=false"))
        assert status == 0, printed
        yield run, home, printed + call(run.command(word))[1]


def test_a_run_on_signed_addresses(private: tuple[Run, Path, str]) -> None:
    run, home, printed = private
    assert "skipped http://127.0.0.1" in printed and "bad.bin" in printed
    assert SECRET not in printed and not leaks(run.path, home)
    (bad,) = [json.loads(line) for line in (run.path / "bad_samples.jsonl").open()]
    assert re.fullmatch(r"http:\S+/bad\.bin~[0-9a-f]{16}", bad["path"])
    assert {"log.txt", "index.html", "environment.json", "run_facts.json"} <= {
        file.name for file in run.path.iterdir()
    }


def test_headers_are_known_at_the_next_start(
    private: tuple[Run, Path, str], served: WebServer
) -> None:
    run, home, _ = private
    assert list(home.glob("cogfast/headers-*.jsonl"))
    served.requests.clear()
    status, printed = call(run.command("args.resume=latest", "args.train_iters=3"))
    assert status == 0 and SECRET not in printed, printed
    # Sizes are asked for; of the headers only that of the bad file is read again.
    asked = {r.partition("?")[0] for r in served.requests if r.startswith("GET")}
    assert asked <= {"GET /bad.bin", "GET /.cogfast-index"}
    assert len((run.path / "bad_samples.jsonl").read_text().splitlines()) == 1
    assert not leaks(run.path, home)


COMMANDS = {
    "report": ["report", "{run}"],
    "publish": ["publish", "{run}", "me/tiny", "--dry-run"],
    "convert": ["convert", "{run}", "{out}/sat", "--to", "sat"],
    "sample": ["sample", "{run}", "--prompt", "a", "--steps", "1", "--out", "{out}/samples"],
    "dry run": ["train", "--base", "{base}", "--dry-run"],
    "resume": ["train", "--resume", "{run}", "args.train_iters=4"],
    "cache": ["cache", "--base", "{base}", "args.latent_cache={out}/cache"],
    "plan": ["plan", "--base", "{base}", "--gpu", "24"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_on_such_a_run(
    private: tuple[Run, Path, str], tmp_path: Path, data: Path, name: str
) -> None:
    run, home, _ = private
    base = tmp_path / "signed.yaml"
    shutil.copy(run.base, base)
    places = {"run": run.path, "out": tmp_path / "out", "base": base}
    words = [word.format(**places) for word in COMMANDS[name]]
    more = [f"args.load={SIGNED}", f"args.train_data=[{SIGNED}]"] if name == "dry run" else []
    status, printed = call([*words, *more])
    assert status == 0 and SECRET not in printed, printed
    assert ("write what is hidden" in printed) == (name == "dry run")
    assert not leaks(run.path, home, tmp_path)


KEYS = ["load", "load_lora", "save", "run_folder", "latent_cache", "resume", "output_dir"]
KEYS += ["local_cache", "eval_prompt_file", "train_iters", "push_to_hub", "unknown_key"]
LISTS = ["train_data", "valid_data", "eval_images", "eval_prompts"]
OTHERS = [
    ["convert", "{}", "out", "--to", "sat"],
    ["sample", "{}", "--prompt", "a"],
    ["report", "{}"],
    ["publish", "{}", "me/x", "--dry-run"],
    ["doctor", "{}"],
    ["plan", "{}", "--gpu", "24"],
    ["train", "{}", "--data", "{}"],
    ["train", "--base", "{}"],
    ["finetune", "--model_path", "{}", "--data_root", "{}"],
    ["{}"],
]


def check_words(words: list[str], address: str, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(store, "_PATIENCE", 0.0)
    file = tmp_path / "torchrun_error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["cogfast", *words])
        assert main(words) in (1, 2)
    printed = capsys.readouterr()
    assert printed.err.startswith("cogfast: ") and SECRET not in printed.err + printed.out
    assert SECRET[:8] not in printed.err and SECRET[-8:] not in printed.err
    assert not leaks(tmp_path)


@pytest.mark.parametrize("key", [*KEYS, *LISTS])
def test_an_error_about_a_key(key: str, run: Run, capsys, tmp_path: Path, monkeypatch) -> None:
    for address in USERS[:1]:
        word = f"args.{key}={f'[{address}]' if key in LISTS else address}"
        words = run.command(word, *(["args.eval_interval=1"] if key.startswith("eval") else []))
        if key == "eval_prompts":  # any text is one
            words = run.command(f"args.eval_prompts={address}")
        check_words(words, address, capsys, tmp_path, monkeypatch)


@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words[0])
def test_an_error_of_a_command(words: list[str], capsys, tmp_path: Path, monkeypatch) -> None:
    given = [word.replace("{}", USERS[0]) for word in words]
    check_words(given, USERS[0], capsys, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("address", USERS)
@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words[0])
def test_any_error_of_a_command(
    words: list[str], address: str, capsys, tmp_path: Path, monkeypatch
) -> None:
    given = [word.replace("{}", address) for word in words]
    check_words(given, address, capsys, tmp_path, monkeypatch)


@pytest.mark.soak
def test_a_traceback(private: tuple[Run, Path, str]) -> None:
    run, home, _ = private
    for word in (f"args.load={USERS[0]}", f"args.train_data=[{USERS[3]}]"):
        done = tiny_run.run(run.command(word, "--traceback"))
        assert done.returncode and "Traceback (most recent call last)" in done.stdout
        assert SECRET not in done.stdout and not leaks(run.path, home)


def test_standard_streams_show_no_secret(tmp_path: Path, monkeypatch) -> None:
    with open(tmp_path / "out", "w") as file:
        stream = streams._kept(file, file.fileno())
        print("of a library:", USERS[0], SIGNED, file=stream, flush=True)
    assert (tmp_path / "out").read_text() == "of a library: s3://bucket/a s3://bucket/a\n"


# --- what a resume of a received run asks ---


def received(run: Run, served: WebServer, **changes: object) -> Path:
    """A run whose own file names addresses of the server: {dotted key of the configuration: path}."""
    manifest = read_manifest(run.checkpoint)
    for key, value in changes.items():
        node = manifest["config"]
        *parents, last = key.split("__")
        for name in parents:
            node = node[int(name) if name.isdigit() else name]
        node[int(last) if last.isdigit() else last] = value
    write_manifest(run.checkpoint, manifest)
    served.requests.clear()
    return run.path


@pytest.fixture
def received_run(run: Run) -> Run:
    return run.with_args(save_interval=1).train(steps=1)


def test_a_resume_needs_no_first_weights(received_run: Run, served: WebServer, capsys) -> None:
    address = f"{served.address}/weights?{SECRET}"
    folder = received(received_run, served, args__load=address, args__load_lora=address)
    status = main(["train", "--resume", str(folder), "args.train_iters=2"])
    printed = capsys.readouterr().err
    assert status == 0 and SECRET not in printed, printed
    assert not served.requests


def test_a_run_names_all_addresses_that_it_needs(
    received_run: Run, served: WebServer, capsys
) -> None:
    """The words work as they are printed, but for what is hidden in them."""
    url = f"{served.address}/encoder?{SECRET}"
    parts = {
        "model__first_stage_config": part("cogfast.model.autoencoder.VideoAutoencoder", path=url),
        "model__conditioner_config__params__emb_models__0": part(
            "sgm.modules.encoders.modules.FrozenT5Embedder", model_dir=url
        ),
    }
    folder = str(received(received_run, served, args__load=url, args__load_lora=url, **parts))
    resume = ["train", "--resume", folder, "args.train_iters=2"]
    for command in (resume, ["sample", folder, "--prompt", "a"]):
        for more in ([], ["--dry-run"]):
            assert main([*command, *more]) == 2
            text, line = capsys.readouterr().err.splitlines()
            assert SECRET not in text + line and "(write what is hidden: passwords" in text
            words = line.removeprefix("cogfast: ").split()
            keys = ["conditioner_config.params.emb_models.0.params.model_dir"]
            keys.append("first_stage_config.params.path")
            assert words == [f"model.{key}={served.address}/encoder" for key in keys]
        assert main([*command, *words, "--dry-run"]) == 0
        assert "write what is hidden" not in capsys.readouterr().out
    assert not served.requests


@pytest.mark.parametrize("load", ["address", "me/no-such-model"])
def test_a_resume_of_adapters_downloads_no_base(
    run: Run, data: Path, served: WebServer, capsys, load: str
) -> None:
    full = run.with_args(save_interval=1).train(steps=1)
    lora = run.with_lora(2).into(run.folder / "lora").with_words(f"args.load={full.checkpoint}")
    done = lora.with_words("args.force_train=true").train("args.save_interval=1", steps=1)
    name = f"{served.address}/base?{SECRET}" if load == "address" else load
    folder = received(done, served, args__load=name)
    assert main(["train", "--resume", str(folder), "args.train_iters=2"]) == 2
    line = capsys.readouterr().err
    assert "args.load=" in line and "download" in line and SECRET not in line
    # Its file as a base is a received file, too.
    file = folder / "training_config.yaml"
    file.write_text(re.sub(r"(?m)^  load: .*$", f"  load: {name}", file.read_text()))
    again = ["train", "--base", f"{folder}/training_config.yaml", f"args.run_folder={folder}-2"]
    assert main([*again, "args.train_iters=2"]) == 2
    line = capsys.readouterr().err
    assert "args.load=" in line and "download" in line and SECRET not in line
    assert not served.requests
    given = f"args.load={full.checkpoint}"
    assert main(["train", "--resume", str(folder), "args.train_iters=2", given]) == 0
    assert not served.requests


def test_a_resume_runs_publishes_and_removes_nothing_of_the_runs_choice(
    received_run: Run, served: WebServer, tmp_path: Path, capsys
) -> None:
    own, canary = tmp_path / "objects", tmp_path / "canary"
    values = {
        "args__eval_command": f"touch {canary} {{samples}}",
        "args__push_to_hub": "me/leaked",
        "args__local_cache": f"{own}:4KB",
    }
    # A folder that cannot be made here: the run continues in its own.
    save = "/dev/null/runs"
    folder = received(received_run, served, args__eval_interval=1, args__save=save, **values)
    words = ["args.train_iters=2", "args.eval_num_samples=1", "args.eval_sampling_steps=1"]
    words.append(f"args.valid_data=[{received_run.data}]")
    status = main(["train", "--resume", str(folder), *words])
    printed = capsys.readouterr().err
    assert status == 0, printed
    assert not canary.exists() and not own.exists() and "huggingface" not in printed
    for key, value in values.items():
        name = key.replace("__", ".")
        assert f"{name}: {value} -> None" in printed, printed


def test_a_cache_is_written_only_where_the_command_line_says(
    received_run: Run, served: WebServer, tmp_path: Path, capsys
) -> None:
    cache = tmp_path / "cache"
    values = {"args__latent_cache": str(cache), "args__encode_first": True}
    resume = f"--resume={received(received_run, served, **values)}"
    for command, line in (
        ("train", "the folder has no cache"),
        ("cache", f"latents are written to: args.latent_cache={cache}"),
    ):
        assert main([command, resume, "args.train_iters=2"]) == 2
        assert line in capsys.readouterr().err
    assert not cache.exists()
