"""A model of the hub as args.load: from the local cache, or by download from a stand-in of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.train.preflight.pipeline_folder import fill_from_pipeline, hub_folder, is_hub_id

NAME, COMMIT = "owner/CogVideoX-tiny", "0123456789abcdef0123456789abcdef01234567"
SHARDS = [f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = {"weight_map": {"a": SHARDS[0].partition("/")[2], "b": SHARDS[1].partition("/")[2]}}
NEEDED = {
    "model_index.json": b'{"_class_name": "CogVideoXPipeline"}',
    "scheduler/scheduler_config.json": b'{"_class_name": "CogVideoXDDIMScheduler", '
    b'"prediction_type": "v_prediction", "rescale_betas_zero_snr": true}',
    "tokenizer/spiece.model": b"pieces",
    "tokenizer/tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer"}',
    "text_encoder/config.json": b'{"model_type": "t5"}',
    "text_encoder/model.safetensors": b"t5",
    "transformer/config.json": b'{"num_layers": 2}',
    "transformer/diffusion_pytorch_model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: b"first",
    SHARDS[1]: b"second",
    "vae/config.json": b'{"_class_name": "AutoencoderKLCogVideoX", "scaling_factor": 0.7}',
    "vae/diffusion_pytorch_model.safetensors": b"vae",
}
# Files that nothing reads, or that can run code.
OTHERS = {
    "README.md": b"a model",
    "text_encoder/pytorch_model.bin": b"pickle",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"rounded",
    "vae/diffusion_pytorch_model.pt": b"pickle",
    "vae/modeling.py": b"import os",
    "pipeline.py": b"import os",
    "assets/video.mp4": b"mp4",
}


def write_snapshot(cache: Path, files: dict[str, bytes]) -> Path:
    """Write a model into a cache folder as the hub's client lays it out."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        file = model / "snapshots" / COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return model / "snapshots" / COMMIT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache_becomes_its_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_snapshot(cache, NEEDED)
    config = fill_from_pipeline(load_config([], [f"args.load={NAME}"]))
    assert config.args.load == str(folder)
    assert config.origins["args.load"] == f"hub model {NAME}"
    assert config.model.first_stage_config.params.path == str(folder / "vae")
    (tmp_path / "base.yaml").write_text(f"args: {{load: {NAME}, bf16: true}}\n")
    assert main(["train", "--base", str(tmp_path / "base.yaml"), "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"load: {folder} # hub model {NAME}" in text


def test_an_offline_machine_without_the_model_gets_one_line(cache: Path, tmp_path: Path) -> None:
    wanted = (
        f"args.load={NAME}: no such folder, and no complete CogVideoX pipeline of this name in the hub's "
        rf"cache {cache}; the hub cannot be reached \(.*\); run hf download {NAME} on a machine with"
    )
    with pytest.raises(ValueError, match=wanted):
        fill_from_pipeline(load_config([], [f"args.load={NAME}"]))
    base = tmp_path / "base.yaml"
    base.write_text(f"args: {{load: {NAME}}}\n")
    assert main(["train", "--base", str(base)]) == 2


def test_every_file_of_the_pipeline_must_be_in_the_cache(cache: Path) -> None:
    folder = write_snapshot(cache, NEEDED)
    assert hub_folder(NAME) == folder
    for name, content in NEEDED.items():
        # If the index were missing, a transformer of one file would be looked for.
        if name.endswith((".index.json", "tokenizer_config.json")):
            continue
        (folder / name).unlink()
        lacking = rf"--model_path={NAME}: no such folder.*\({folder} has no {name}\)"
        with pytest.raises(ValueError, match=lacking):
            hub_folder(NAME, key="--model_path")
        (folder / name).write_bytes(content)
    assert hub_folder(NAME) == folder


def test_a_dry_run_downloads_nothing(cache: Path) -> None:
    with pytest.raises(
        ValueError, match="--dry-run and the configuration of a run download nothing"
    ):
        fill_from_pipeline(load_config([], [f"args.load={NAME}"]), may_download=False)


def test_hub_ids_and_paths_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert is_hub_id("THUDM/CogVideoX1.5-5B-I2V") and is_hub_id("runs/other")
    for name in ("runs/mine", "model", "/a/b", "a/b/c", "./a", "../a", "a/", "a/b c", "a/{b}"):
        assert not is_hub_id(name)
    with pytest.raises(ValueError, match=r"args.load=a/b--c: no such folder, and not a model id"):
        hub_folder("a/b--c")


class Hub(BaseHTTPRequestHandler):
    """The hub's HTTP for one model: its facts, its list of files and the files."""

    requests: list[str] = []
    files = NEEDED | OTHERS

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in self.files.items()
            ]
            self.answer(json.dumps(rows).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in self.files]
            facts = {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings}
            self.answer(json.dumps(facts).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.answer(self.files[path.split(f"{COMMIT}/")[1]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def start(name: str, endpoint: str, home: Path) -> subprocess.Popen:
    code = "import sys; from cogfast.train.preflight.pipeline_folder import hub_folder\n"
    code += "try: print(hub_folder(sys.argv[1]))\nexcept ValueError as error: print('ERROR', error)"
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", code, name],
        env={**os.environ, **own, "HF_HUB_ETAG_TIMEOUT": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_download_takes_what_is_read_once_for_all_ranks(hub: str, tmp_path: Path) -> None:
    ranks = [start(NAME, hub, tmp_path) for _ in range(2)]
    output = [rank.communicate(timeout=120) for rank in ranks]
    (folder,) = {Path(out.strip()) for out, _ in output}
    assert folder.is_dir(), output
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == set(NEEDED)
    fetched = [request for request in Hub.requests if request.startswith(f"GET /{NAME}/resolve")]
    assert sorted(fetched) == sorted(f"GET /{NAME}/resolve/{COMMIT}/{name}" for name in NEEDED)
    before = len(Hub.requests)
    assert start(NAME, hub, tmp_path).communicate(timeout=120)[0].strip() == str(folder)
    assert len(Hub.requests) == before


def test_a_model_that_the_hub_does_not_have(hub: str, tmp_path: Path) -> None:
    unknown, unreachable = "owner/other", "http://127.0.0.1:9"
    found = [start(unknown, hub, tmp_path), start(NAME, unreachable, tmp_path)]
    texts = [process.communicate(timeout=120)[0] for process in found]
    assert (
        f"ERROR args.load={unknown}: no such folder, and no model of this name on the hub"
        in texts[0]
    )
    assert f"ERROR args.load={NAME}: no such folder" in texts[1]
    assert "the hub cannot be reached" in texts[1] and f"hf download {NAME}" in texts[1]
