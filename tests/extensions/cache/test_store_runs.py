"""`cogfast cache` and training with args.latent_cache in an object store."""

from pathlib import Path
from unittest.mock import patch

import pytest

from cogfast.distributed.model_batches import ModelBatches
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.stores import store
from tests.extensions.cache.test_cache import contents
from tests.extensions.cache.test_cache_kills import check_kills
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.s3_server import Fault, S3Server
from tests.support.tiny_run import write_clips


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.3)


def objects(url: str) -> dict[str, bytes]:
    """The entries of a cache in a store, by their names."""
    found = [one for one in store.find(url) if one.endswith((".safetensors", ".bad"))]
    return {one.removeprefix(f"{url}/"): store.read(one) for one in found}


def test_a_cache_in_a_store_is_that_of_a_folder(
    server: S3Server, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Entries and losses bit for bit; no request for a sample whose entries are in the local cache."""
    url = f"{server.url}/runs/cache"
    run = Run(write_clips(tmp_path / "data", 4), tmp_path).with_args(train_iters=2)
    stored = run.cached_in(url)
    cache_latents(run.cached_in(tmp_path / "cache").config().run)
    cache_latents(stored.config().run, price=7200.0)
    assert "GPU hours ($" in log.text and f"{url}: 4 samples, 0 bad" in log.text
    assert objects(url) == contents(tmp_path / "cache") and len(objects(url)) == 8

    found, asked = {}, {}
    for name, cache in (("disk", tmp_path / "cache"), ("store", url)):
        server.requests.clear()
        with patch.object(ModelBatches, "share_bad") as share_bad:
            done = run.cached_in(cache).into(tmp_path / name).train()
        assert share_bad.call_count == 2 + 1  # with each line of the log, and at the end
        found[name] = done.losses
        asked[name] = [path for _, path in server.requests if path.endswith(".safetensors")]
    assert found["store"] == found["disk"] and len(found["disk"]) == 2
    # The second step, which reads the same clips, makes no request.
    assert len(set(asked["store"])) == 8 and len(asked["store"]) == 16 and not asked["disk"]

    # An entry that is gone is missed before training, and is the only one that is encoded again.
    store.remove([f"{url}/{next(one for one in objects(url) if one.startswith('video'))}"])
    config = stored.config()
    assert_refused(stored.trainer, f"args.latent_cache={url}: <...>3 of 4 usable")
    cache_latents(config.run)
    assert f"{url}: encoding 1 of 4 clips and 0 of 4 captions" in log.text
    assert objects(url) == contents(tmp_path / "cache")

    # Errors are one line, and what was written counts.
    server.faults = [Fault(403)]
    line = "^args.latent_cache: s3:<...>access denied<...>check the credentials"
    assert_refused(stored.trainer, line)
    assert_refused(lambda: cache_latents(config.run), line, RuntimeError)
    server.faults = [Fault(503, method="PUT", path="video-.*/.*safetensors")]
    other = run.cached_in(f"{server.url}/runs/other").config()
    line = "^args.latent_cache: s3:<...>asks for fewer requests<...>is kept: <...>continues"
    assert_refused(lambda: cache_latents(other.run), line, RuntimeError)
    left = objects(f"{server.url}/runs/other")
    assert left.items() < objects(url).items() and len(left) == 4
    nowhere = run.cached_in("s3://no-such-bucket/cache").config()
    line = "no-such-bucket/<...>no such bucket; create it"
    assert_refused(lambda: cache_latents(nowhere.run), line, RuntimeError)


def test_a_video_that_its_store_does_not_give_is_read_later(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage makes no sample of the cache bad for ever."""
    data, url = write_clips(tmp_path / "data", 2), f"{server.url}/outage"
    for file in data.rglob("*.*"):
        store.write(f"{url}/{file.relative_to(data)}", file.read_bytes())
    run = Run(data, tmp_path).with_args(train_data=[url], max_bad_fraction=0.5)
    run = run.cached_in(f"{url}/cache")
    config = run.config()
    server.faults, server.requests = [Fault(403, method="PUT", path="/cache")], []
    line = f"^args.latent_cache: {url}/cache: cannot be written: access denied <...>; run `cogfast cache` again$"
    assert_refused(lambda: cache_latents(config.run), line, RuntimeError)
    assert not any(path.endswith(".mp4") for _, path in server.requests), "it has read no video"
    # This run has no copies of the videos, which the other one made for their hashes.
    server.faults = [Fault(503, method="PUT", path="video-.*/.*safetensors")]
    line = "^args.latent_cache: <...>continues from there"
    assert_refused(lambda: cache_latents(config.run), line, RuntimeError)
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "other"))
    server.faults = [Fault(503, method="GET", path=".*videos/1.mp4")]
    line = f"^{url}/videos/1.mp4: <...>asks for fewer requests<...>; <...>run `cogfast cache`"
    assert_refused(lambda: cache_latents(config.run), line, RuntimeError)
    # The time of the network is not that of the decoder.
    server.faults = [Fault("slow", method="GET", path=".*videos/1.mp4", seconds=1.5)]
    cache_latents(run.config("args.decode_timeout=1").run)
    names = [*objects(f"{url}/cache")]
    assert len(names) == 4 and not any(name.endswith(".bad") for name in names)


@pytest.mark.soak
def test_kills_of_two_workers_leave_nothing_half(server: S3Server, tmp_path: Path) -> None:
    url = f"{server.url}/killed"
    assert check_kills(tmp_path, url, objects, lambda: len(store.find(url)), num_kills=10) >= 6


@pytest.mark.soak
def test_two_ranks_train_from_a_store_as_from_a_disk(server: S3Server, tmp_path: Path) -> None:
    run = Run(write_clips(tmp_path / "data", 12), tmp_path).with_args(train_iters=8, num_workers=2)
    found = {}
    for name, cache in (("disk", tmp_path / "cache"), ("store", f"{server.url}/ranks")):
        cached = run.cached_in(cache).into(tmp_path / name)
        for command in ("cache", "train"):
            cached.launch(2, name=command)
        found[name] = cached.losses
    assert found["store"] == found["disk"] and len(found["disk"]) == 8
    assert objects(f"{server.url}/ranks") == contents(tmp_path / "cache")
