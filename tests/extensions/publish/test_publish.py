"""`cogfast publish` and args.push_to_hub, with the hub's own client, against a stand-in of the hub."""

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cogfast.__main__ import main
from cogfast.model.weights.checkpoint_manifest import read_manifest, write_manifest
from tests.cli.hostile.web_server import serving
from tests.support.runs import Run
from tests.support.tiny_run import read_run_weights

REPO = "me/my-lora"


class Hub(BaseHTTPRequestHandler):
    """The endpoints that HfApi.upload_folder calls; all but text is LFS objects."""

    objects: dict[str, bytes]
    files: dict[str, bytes]
    puts: list[str]
    created: list[bool]  # whether each new repository is private
    refuses: list[str]  # the next requests with this in their path are refused, once each

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def do_PUT(self) -> None:
        content, oid = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.objects[oid] = content
        self.puts.append(oid)
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._body()
        for text in list(self.refuses):
            if text in self.path:
                self.refuses.remove(text)
                self._answer(403, {"error": "no rights"})
                return
        url = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            assert self.headers["Authorization"] == "Bearer hf_test"
            wanted = json.loads(body)  # older clients say {"private": true}
            self.created.append(wanted.get("visibility") == "private" or "private" in wanted)
            self._answer(200, {"url": f"{url}/{REPO}"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path == f"/api/models/{REPO}/preupload/main":
            of = lambda f: "regular" if f["path"].endswith(".md") else "lfs"
            named = [
                {"path": f["path"], "uploadMode": of(f), "shouldIgnore": False, "oid": None}
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": named})
        elif self.path == f"/{REPO}.git/info/lfs/objects/batch":
            found = []
            for one in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{url}/lfs/{one['oid']}", "header": {}}}
                found.append(one if one["oid"] in self.objects else {**one, "actions": upload})
            self._answer(200, {"objects": found, "transfer": "basic"})
        elif self.path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.objects[value["oid"]]
            commit = {"commitUrl": f"{url}/{REPO}/commit/{40 * 'a'}", "commitOid": 40 * "a"}
            self._answer(200, {"success": True, **commit, "hookOutput": ""})
        else:
            self._answer(404, {"error": self.path})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    state = {"objects": {}, "files": {}, "puts": [], "created": [], "refuses": []}
    handler = type("OneHub", (Hub,), state)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with serving(handler) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        yield handler


@pytest.fixture(scope="module")
def base_run(shared_run: Run) -> Path:
    """Weights that LoRA can adapt."""
    return shared_run.with_args(train_iters=1).train().path


@pytest.fixture
def run(run: Run) -> Run:
    """A run whose evaluation samples two prompts, or captions of the data."""
    valid = [str(run.data)]
    return run.with_args(train_iters=1, eval_interval=1, valid_data=valid, force_train=True)


def card_of(text: bytes | str) -> tuple[dict, str]:
    text = text.decode() if isinstance(text, bytes) else text
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_lora_is_published_and_an_interrupted_upload_is_repeated(
    run: Run, tmp_path: Path, base_run: Path, hub: type[Hub], capsys: pytest.CaptureFixture
) -> None:
    prompts = ['a "red" bar: one', "a bar"]
    run = run.with_lora(4).with_args(load=str(base_run), eval_prompts=prompts).train().path
    hub.refuses.append("/commit/")
    assert main(["publish", str(run), REPO]) == 1
    assert "cogfast: me/my-lora is not published (" in capsys.readouterr().err
    sent = list(hub.puts)
    assert len(sent) == 3 and not hub.files
    assert main(["publish", str(run), REPO, "--private"]) == 0
    assert hub.created == [False, True]
    assert hub.puts == sent, "the hub has these objects"
    assert capsys.readouterr().out.strip().endswith(REPO)
    names = {"README.md", "pytorch_lora_weights.safetensors", "videos/0.mp4", "videos/1.mp4"}
    assert hub.files.keys() - {".gitattributes"} == names
    (tmp_path / "lora").mkdir()
    lora = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    lora.write_bytes(hub.files[lora.name])
    averaged = read_run_weights(run / "checkpoints" / "00000001", ema=True)
    written = load_file(lora)["transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"]
    assert torch.equal(written, averaged["blocks.0.attention.qkv.matrix_A.0"])
    head, body = card_of(hub.files["README.md"])
    assert head["base_model"] == "zai-org/CogVideoX-5b" and head["license"] == "other"
    assert head["pipeline_tag"] == "text-to-video" and "lora" in head["tags"]
    videos = sorted((run / "samples" / "step-00000001").glob("*.mp4"))
    listed = json.loads((videos[0].parent / "prompts.json").read_text())
    for i, (item, video) in enumerate(zip(head["widget"], videos, strict=True)):
        assert item == {"text": listed[video.name], "output": {"url": f"videos/{i}.mp4"}}
        assert hub.files[f"videos/{i}.mp4"] == video.read_bytes()
    assert {item["text"] for item in head["widget"]} == set(prompts)
    assert (
        "LoRA, rank 4" in body
        and "| clips | 6 |" in body
        and "    height=32,\n    width=32,\n" in body
    )
    code = body.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'pipe.load_lora_weights("me/my-lora")' in code


def test_nothing_of_the_data_is_published(
    run: Run, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights of an image-to-video model, whose samples have captions of the data as prompts."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    run = run.of("1.5_5b_i2v").train().path
    (run / "training_config.yaml").write_text("a secret")
    assert main(["publish", str(run), REPO, "--dry-run"]) == 0
    files = {
        p.relative_to(run / "hub").as_posix(): p for p in (run / "hub").rglob("*") if p.is_file()
    }
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert files.keys() == {"README.md", "videos/0.mp4", "transformer/config.json", weights}
    caption = next((data / "labels").iterdir()).read_text().split()[0:2]
    for path in files.values():
        for secret in (str(data), str(tmp_path), " ".join(caption), "secret"):
            assert secret.encode() not in path.read_bytes(), path
    head, body = card_of(files["README.md"].read_text())
    assert head["base_model"] == "zai-org/CogVideoX1.5-5B-I2V"
    assert [item["text"] for item in head["widget"]] == ["-"]
    # The trainers' scale of the first frame is not the pipeline's.
    assert "pipe.vae.register_to_config(invert_scale_latents=False)" in body
    assert 'subfolder="transformer"' in body


# HTML, Markdown, text from right to left, terminals; a blank and a joiner of other languages
PLAIN = "\u3000\u0915\u094d\u200d\u0937"
ODD = f"<img src=x onerror=a()> | \u202ex\x1b[31m{PLAIN}\n# b"


def test_the_card_of_a_received_run_is_plain(run: Run) -> None:
    done = run.with_args(save_interval=1).train(steps=1)
    manifest = read_manifest(done.checkpoint)
    keys = ("lr", "lr_schedule", "seed")
    manifest["config"]["args"] |= dict.fromkeys(keys, ODD)
    manifest["config"]["data"]["params"] |= {"video_size": [ODD, ODD], "fps": ODD}
    write_manifest(done.checkpoint, manifest)
    assert main(["publish", str(done.path), REPO, "--dry-run"]) == 0
    text = (done.path / "hub" / "README.md").read_text()
    assert all(c.isprintable() or c in f"\n{PLAIN}" for c in text) and "<img" not in text
    assert PLAIN in text
    rows = [line for line in text.splitlines() if "&lt;img src=x onerror=a()&gt; &#124;" in line]
    assert len(rows) == 5 and all(row.count("|") == 3 for row in rows)


def test_only_files_of_the_run_are_published(
    tmp_path: Path, base_run: Path, capsys: pytest.CaptureFixture
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(base_run, run)
    samples = run / "samples" / "step-00000001"
    for folder in (outside, samples):
        folder.mkdir(parents=True)
        (folder / "e.mp4").write_text(f"of {folder.name}")
    (samples / "a.mp4").symlink_to(outside / "e.mp4")
    (samples / "b.mp4").symlink_to("../../training_config.yaml")
    os.mkfifo(samples / "c.mp4")
    (samples / "d.mp4").symlink_to("d.mp4")
    words = ["publish", str(run), REPO, "--dry-run"]
    assert main(words) == 0
    published = [path.read_text() for path in (run / "hub" / "videos").iterdir()]
    assert published == ["of step-00000001"]
    text = (
        "samples/step-00000001/{}.mp4 is not published: it must be a file of the run, and no link"
    )
    found = [line for line in capsys.readouterr().err.splitlines() if "not published" in line]
    assert [line[-len(text) + 1 :] for line in found] == [text.format(name) for name in "abcd"]
    # The folder of the samples, and that of the files to publish
    shutil.rmtree(samples)
    samples.symlink_to(outside)
    assert main(words) == 0 and not (run / "hub" / "videos").exists()
    shutil.rmtree(run / "hub")
    (run / "hub").symlink_to(outside)
    assert main(words) == 2 and [*outside.iterdir()] == [outside / "e.mp4"]


def test_the_card_of_a_control_model_names_no_other_base(
    run: Run, tmp_path: Path, data: Path
) -> None:
    clips = [str(path) for path in sorted((data / "videos").glob("*.mp4"))]
    rows = zip(clips, clips[1:] + clips[:1], strict=True)
    lines = [json.dumps({"path": a, "caption": "a", "control": b}) + "\n" for a, b in rows]
    (tmp_path / "metadata.jsonl").write_text("".join(lines))
    size = {"video_size": [32, 32], "fps": 8, "max_num_frames": 9}
    dataset = {"target": "cogfast.data.datasets.VideoManifest", "params": size}
    table = str(tmp_path / "metadata.jsonl")
    run = run.with_args(dataset=dataset, train_data=[table], valid_data=None, split="1")
    load, cards = None, []
    for conditions, rank in (("control", None), ("control", 4), ("image, control", None)):
        words = [f"model.conditions=[{conditions}]", "args.eval_interval=null"]
        words += [f"model.network_config.params.in_channels={8 * (2 + conditions.count(','))}"]
        of_card = run.with_args(lora_rank=rank, load=load).into(tmp_path / f"{len(cards)}")
        folder = of_card.train(*words).path
        load = str(folder) if rank is None and load is None else None
        assert main(["publish", str(folder), REPO, "--dry-run"]) == 0
        head, body = card_of((folder / "hub" / "README.md").read_text())
        assert "base_model" not in head and head["pipeline_tag"].endswith("to-video")
        name = (
            "control model"
            if conditions == "control"
            else "model with the conditions image, control"
        )
        assert f"of a {name}, trained with cogfast on 6 clips" in body
        assert "zai-org" not in body and str(tmp_path) not in body
        cards.append(body)
    for body in cards[:2]:
        code = body.split("```python\n")[1].split("```")[0]
        compile(code, "card", "exec")
        assert 'FunControlPipeline.from_pretrained("the folder of the control model"' in " ".join(
            code.replace("(\n    ", "(").split()
        )
    assert "pipe.load_lora_weights" in cards[1]
    assert "```" not in cards[2] and "`cogfast sample` does" in cards[2]


def test_a_run_pushes_its_last_checkpoint_and_survives_a_hub_that_refuses(
    run: Run, base_run: Path, hub: type[Hub], log: pytest.LogCaptureFixture
) -> None:
    run = run.with_lora(4).with_words(f"args.push_to_hub={REPO}", "args.eval_interval=null")
    run = run.with_args(load=str(base_run))
    run.train()
    assert hub.files["pytorch_lora_weights.safetensors"]
    assert "published: http" in log.text
    hub.refuses.append("/api/repos/create")
    run.resume(steps=2)
    found = [r.getMessage() for r in log.records if "args.push_to_hub" in r.getMessage()]
    assert len(found) == 1 and "me/my-lora is not published" in found[0]
    assert "finished at step 2" in log.text


def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["publish", str(tmp_path), REPO]) == 2
    assert main(["publish", str(tmp_path), "my-lora"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("no run with a checkpoint; give the folder of a run")
    assert (
        lines[1]
        == "cogfast: my-lora must be a repository of the hub, such as me/my-lora, and no path here; "
        "write OWNER/my-lora, with your name or organization"
    )


def test_the_licence_is_the_base_s(tmp_path: Path, data: Path) -> None:
    from cogfast.extensions.publish.publish import _license

    text = "---\nlicense: other\nlicense_name: cogvideox\nlicense_link: L\ntags: [a]\n---\n# a\n"
    (tmp_path / "README.md").write_text(text)
    assert _license(tmp_path) == {
        "license": "other",
        "license_name": "cogvideox",
        "license_link": "L",
    }
    for damaged in ("---\n[\n---\n", "no front", "---\nlicense: [\n---", "---\n- a\n---\n"):
        (tmp_path / "README.md").write_text(damaged)
        assert _license(tmp_path) == {"license": "other"}
