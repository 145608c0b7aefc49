"""Publishes a run on the Hugging Face hub: files that diffusers loads, videos and a model card.

Nothing of the data is published but its size: no caption, no path, no file of the run but those named here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import StrictUndefined, Template

from cogfast.config.components import own_objective
from cogfast.core.addresses import is_hub_id
from cogfast.core.json_files import brief, read_limited
from cogfast.core.values import OF_TEXTS, counted, printable, select
from cogfast.extensions.formats.adapters import adapters_of
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.image_scale import difference_of_run
from cogfast.extensions.page.record import read_run
from cogfast.extensions.sample.prompt_files import given_prompts
from cogfast.model.config import member_of
from cogfast.model.keys import conditions_of_run
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, read_manifest, run_of
from cogfast.model.weights.run_checkpoint import open_run
from cogfast.train.keys import TrainKeys
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:
    from cogfast.distributed.process_groups import StopRequest
    from cogfast.train.run.parts import Parts
    from cogfast.train.run.trackers import Trackers

logger = logging.getLogger(__name__)

_CARD = Path(__file__).with_name("model_card.md.jinja")
_NUM_VIDEOS = 4
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")  # in the hub client's cache
_FRONT = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)
_LOGIN = "no token of the hub; run `hf auth login`, or set HF_TOKEN in the environment"


def publish(path: Path, repo: str, is_dry_run: bool = False, is_private: bool | None = None) -> str:
    """Run `cogfast publish`. Return where the files are.

    path: a run or one of its checkpoints. is_private: of a new repository; None: the owner's setting.
    ValueError for user errors, RuntimeError if the hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if not is_hub_id(repo):
        text = "must be a repository of the hub, such as me/my-lora, and no path here"
        fix = "" if "/" in repo else f"; write OWNER/{brief(repo)}, with your name or organization"
        raise ValueError(f"{brief(repo)} {text}{fix}")
    checkpoint = find_run_checkpoint(path) if path.is_dir() else None
    if checkpoint is None:
        what = "no run with a checkpoint" if path.is_dir() else "no such folder"
        raise ValueError(f"{path}: {what}; give the folder of a run")
    if is_dry_run:
        target = run_of(checkpoint) / "hub"
        # A folder that was downloaded may have one, which leads to any folder here.
        if target.is_symlink() or not (target.is_dir() or not target.exists()):
            raise ValueError(f"{target} is no folder of its own, which --dry-run writes; remove it")
        shutil.rmtree(target, ignore_errors=True)
        return str(write_files(checkpoint, repo, target))
    if get_token() is None:
        raise ValueError(_LOGIN)
    with TemporaryDirectory(prefix="hub-", dir=run_of(checkpoint)) as scratch:
        folder = write_files(checkpoint, repo, Path(scratch, "files"))
        try:
            api = HfApi()
            api.create_repo(repo, private=is_private, exist_ok=True)
            # Files that an interrupted upload has sent are not sent again: the hub knows their hashes.
            text = f"cogfast: step {read_manifest(checkpoint)['step']}"
            info = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=text)
        # The client has many types of exceptions, and its HTTP library has more.
        except Exception as error:
            text = f"{repo} is not published ({brief(str(error))}); cogfast publish sends what is missing"
            raise RuntimeError(text) from error
    return str(info.repo_url)


class Push(Watcher):
    """Publishes the last checkpoint of a run that is complete (args.push_to_hub)."""

    def __init__(self, parts: Parts, trackers: Trackers) -> None:
        self.repo, self.writer, self.is_main = (
            parts.launch.args.push_to_hub,
            parts.writer,
            trackers.is_main,
        )

    def at_end(self, stop: StopRequest, is_complete: bool) -> None:
        if self.is_main and is_complete:
            # In a thread, which ends with the process if a signal asks for that.
            thread = Thread(target=self._push, name="push to hub", daemon=True)
            thread.start()
            while thread.is_alive() and not stop.is_asked:
                thread.join(0.2)

    def _push(self) -> None:
        """Publish, and log one line: a failure does not end the run."""
        assert self.repo is not None and self.writer.saved is not None
        try:
            logger.info("published: %s", publish(self.writer.saved, self.repo))
        except Exception as error:
            logger.warning("args.push_to_hub=%s: %s", self.repo, brief(str(error)))


def warn_of_missing_token(args: TrainKeys) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        logger.warning("args.push_to_hub=%s: %s", args.push_to_hub, _LOGIN)


def write_files(checkpoint: Path, repo: str, folder: Path) -> Path:
    """Write what is published of a checkpoint into a new folder, and return it."""
    manifest, record = read_manifest(checkpoint), read_run(run_of(checkpoint))
    sections = ("config.args", "config.data.params", "config.model")
    args, data, model = (select(manifest, key) or {} for key in sections)
    if own := own_objective(model):
        text = f"{checkpoint} was {own}, so that the card's code would sample wrong videos"
        raise ValueError(f"{text}; publish what cogfast convert writes with code that samples it")
    kinds = {s["kind"] for held in manifest["slices"].values() for s in held.values()}
    ema = "shadow" in kinds and args.get("eval_with_ema", True)  # as the videos
    source = open_run(checkpoint, ema, manifest)
    adapters = adapters_of(source)
    target = folder / "transformer" if adapters is None else folder
    dtype = "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"
    to = "diffusers" if adapters is None else "peft"
    convert(checkpoint, target, to, ema, dtype=dtype if adapters is None else None)
    facts, inputs = source.facts, conditions_of_run(model)
    is_i2v, is_control = inputs == ["image"], inputs == ["control"]
    tag = "image" if {"image", "frames"} & set(inputs) else "video" if inputs else "text"
    is_rotary = facts["position"] == "rotary"
    member = member_of(facts["patch_size"], is_i2v, is_rotary)
    in_channels = facts["out_channels"] * (1 + member.has_image)
    is_member = (facts["in_channels"], is_rotary) == (in_channels, member.is_rotary)
    load = str(args.get("load") or "")
    base = _base_id(load, member.name if is_member else None)
    widget = _copy_videos(record, args, folder)
    head = {
        **({} if base is None else {"base_model": base}),
        **(_license(Path(load)) if load else {"license": "other"}),
        "library_name": "diffusers",
        "pipeline_tag": f"{tag}-to-video",
        "tags": ["cogvideox", "diffusers", *([] if adapters is None else ["lora"]), "cogfast"],
        "widget": widget,
    }
    size, frames, fps = (data.get(key) for key in ("video_size", "max_num_frames", "fps"))
    shape = size if isinstance(size, list) and len(size) == 2 else ()
    settings = {
        "clips": manifest.get("num_samples"),
        "trained": "all weights" if adapters is None else f"LoRA, {adapters}",
        "weights": "moving average (EMA)" if ema else "of the last step",
        "steps": manifest["step"],
        "global batch": manifest.get("global_batch"),
        "learning rate": args.get("lr"),
        "schedule": args.get("lr_schedule"),
        "rows x columns": "x".join(map(str, shape)) or None,
        "frames": frames,
        "frames per second": fps,
        "precision": dtype,
        "seed": args.get("seed"),
    }
    prompts = [item["text"] for item in widget if item["text"] != "-"]
    numbers = {"num_frames": frames, **dict(zip(("height", "width"), shape, strict=False))}
    source, plain = _CARD.read_text(encoding="utf-8"), lambda v: printable(str(v), OF_TEXTS)
    card = Template(source, trim_blocks=True, undefined=StrictUndefined, finalize=plain)
    text = card.render(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        repo=repo,
        base=base,
        is_lora=adapters is not None,
        is_i2v=is_i2v,
        is_control=is_control,
        has_dynamic_guidance="guiders.DynamicCFG" in json.dumps(model),
        other_inputs="" if is_i2v or is_control else ", ".join(inputs),
        clips=counted(manifest.get("num_samples", 0), "clip"),
        settings={name: value for name, value in settings.items() if value is not None},
        prompt=json.dumps(prompts[0] if prompts else "a prompt", ensure_ascii=False),
        numbers={key: value for key, value in numbers.items() if isinstance(value, int)},
        fps=fps if isinstance(fps, int) else 8,
        # The pipeline would give the network the first frame at another scale.
        scale_code=(difference_of_run(checkpoint) or ("", ""))[1],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def _copy_videos(record: Any, args: dict, folder: Path) -> list[dict]:
    """Copy the last videos under names without text. Return the card's widget, with the user's own
    prompts alone: a caption of the data is none of them."""
    try:
        known = {"eval_prompts", "eval_prompt_file"} & args.keys()
        own = TrainKeys(**{key: args[key] for key in known})
        texts = {text for text, _ in given_prompts(own)}
    except (ValueError, TypeError) as error:
        logger.warning("prompts are left out of the card (%s)", brief(str(error)))
        texts = set()
    last = max((s.step for s in record.samples if s.step is not None), default=None)
    videos = [s for s in record.samples if s.step == last and s.file.endswith(".mp4")]
    videos = [s for s in videos if last is not None and _is_own_file(record.folder, s.file)]
    widget = []
    for i, sample in enumerate(videos[:_NUM_VIDEOS]):
        (folder / "videos").mkdir(exist_ok=True)
        shutil.copyfile(record.folder / sample.file, folder / "videos" / f"{i}.mp4")
        text = sample.prompt[0] if sample.prompt[0] in texts else "-"
        widget.append({"text": text, "output": {"url": f"videos/{i}.mp4"}})
    return widget


def _is_own_file(run: Path, name: str) -> bool:
    """Return whether a run's folder itself has this file. A link of a run that was downloaded may lead to
    any file here."""
    path = Path(os.path.realpath(run), name)
    if os.path.realpath(path) == str(path) and path.is_file():
        return True
    logger.warning("%s is not published: it must be a file of the run, and no link", brief(name))
    return False


def _base_id(load: str, member: str | None) -> str | None:
    """Return the base's id on the hub; None if it is not known. A path would say where the user keeps it.

    member: the published model; None: the base is derived from one, such as a control model.
    """
    if cached := _CACHED.search(load):
        return f"{cached[1]}/{cached[2]}"
    if load and is_hub_id(load):
        return load
    if member is None:
        return None
    return f"zai-org/{member if '1.5' in member else member.replace('B', 'b')}"


def _license(base: Path) -> dict[str, Any]:
    """Return the licence that the README.md of the base's folder names."""
    with suppress(ValueError, yaml.YAMLError, TypeError):
        text = read_limited(base / "README.md", 1 << 20).decode(errors="replace")
        found = yaml.safe_load((_FRONT.match(text) or ["", ""])[1]) or {}
        kept = {k: str(found[k]) for k in ("license", "license_name", "license_link") if k in found}
        if "license" in kept:
            return kept
    return {"license": "other"}
