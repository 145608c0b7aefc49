"""Reads of objects in pieces: never more than is asked for, and an end to requests that make no progress."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sized
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from cogfast.extensions.stores.store_errors import StoreError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

T = TypeVar("T")

WEB = ("http://", "https://")  # servers without listings
NO_RANGES = "it was changed just now, or its store ignores ranges; a store must support HTTP ranges"
_SILENCE, _NOTED = 60.0, 10.0  # seconds without progress that end a request, and that are logged
_PROGRESS = 1 << 16  # bytes that count as such: a byte now and then is none
_PIECE = 1 << 20  # bytes


def waited(url: str, fs: Any, request: Coroutine[Any, Any, T], came: Sized = ()) -> T:
    """Run a request of a file system in its thread. TimeoutError if `came` grows too slowly. came: what it has read."""
    future = asyncio.run_coroutine_threadsafe(request, fs.loop)
    last, size, is_noted = time.monotonic(), 0, False
    try:
        while True:
            with suppress(TimeoutError):
                return future.result(_NOTED)
            if future.done():  # the error is the request's own
                return future.result()
            if len(came) - size >= _PROGRESS:
                last, size, is_noted = time.monotonic(), len(came), False
            elif (seconds := time.monotonic() - last) > _SILENCE - _NOTED / 2:
                raise TimeoutError(f"nothing came for {seconds:.0f} s")
            elif not is_noted:
                is_noted = True
                text = "%s: nothing came for %.0f s; waiting for %.0f s"
                logger.warning(text, url, seconds, _SILENCE)
    finally:
        future.cancel()


def read_range(url: str, fs: Any, path: str, start: int, end: int, is_whole: bool = False) -> bytes:
    """Return the bytes of an object from `start` to `end`, or fewer if it ends before. is_whole: ask for all of
    it, which an empty object has, too, and stop at `end`."""
    if not url.startswith((*WEB, "s3")):
        # The size comes first: these packages have no other way to read a part of an object.
        end = min(end, fs.info(path)["size"]) if is_whole else end
        return fs.cat_file(path, start=start, end=end) if end > start else b""
    data = bytearray()

    async def read() -> None:
        given = {} if is_whole else {"Range": f"bytes={start}-{end - 1}"}
        async with (_of_web if url.startswith(WEB) else _of_s3)(fs, path, given) as (
            content,
            is_part,
        ):
            if start and not is_part:
                raise StoreError(f"{url}: all of it came in place of a part: {NO_RANGES}")
            while piece := await content.read(min(_PIECE, end - start - len(data))):
                data.extend(piece)

    waited(url, fs, read(), data)
    return bytes(data)


@asynccontextmanager
async def _of_web(fs: Any, path: str, given: dict[str, str]) -> AsyncIterator[tuple[Any, bool]]:
    """Ask a web server; yields the content, and whether it is the range that was asked for."""
    # Unpacked, a small answer may have any size.
    headers = {**fs.kwargs.get("headers", {}), **given, "Accept-Encoding": "identity"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(path), **{**fs.kwargs, "headers": headers}) as answer:
        if answer.status == 404:
            raise FileNotFoundError(path)
        answer.raise_for_status()
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise StoreError(
                f"{path}: its server compresses it; use a server that sends files as they are"
            )
        yield answer.content, answer.status == 206


@asynccontextmanager
async def _of_s3(fs: Any, path: str, given: dict[str, str]) -> AsyncIterator[tuple[Any, bool]]:
    bucket, key, _ = fs.split_path(path)
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **given)
    async with answer["Body"] as content:
        yield content, "ContentRange" in answer


class RangeFile(io.RawIOBase):
    """A seekable file of `num_bytes` bytes, of which read(start, end) returns a range."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        self._read, self._size, self._at = read, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        data = self._read(self._at, end) if end > self._at else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
