"""Reads of objects in pieces: never more than is asked for, and an end to requests that make no progress."""

from __future__ import annotations

import concurrent.futures
import io
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sized
from contextlib import closing
from typing import TYPE_CHECKING, Any

from cogfast.extensions.stores.store_errors import REFUSED, StoreError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

WEB = ("http://", "https://")  # servers without listings
_SILENCE, _NOTED = 60.0, 10.0  # seconds without progress that end a request, and that are logged
_PROGRESS = 1 << 12  # bytes that count as such: a byte now and then is none
_came: Counter[Any] = Counter()  # bytes that the requests of a file system have read


def waited(url: str, fs: Any, request: Coroutine, came: Sized = ()) -> Any:
    """Run a request in the thread of its file system. TimeoutError if `came`, what it has read, does not grow, nor
    what those beside it read, whose connection it may have to wait for, or if that lasts ten times as long."""
    import asyncio  # here: help needs none of its 29 modules

    future = asyncio.run_coroutine_threadsafe(request, fs.loop)
    silence, waiting, size, beside = 0.0, 0.0, 0, _came[fs]
    try:
        while not concurrent.futures.wait([future], _NOTED).done:
            if len(came) - size >= _PROGRESS:
                silence, waiting, size, beside = 0.0, 0.0, len(came), _came[fs]
                continue
            waiting += _NOTED
            if _came[fs] - beside >= _PROGRESS and waiting < 10 * _SILENCE:
                silence, beside = 0.0, _came[fs]
                continue
            silence += _NOTED
            if silence >= _SILENCE:
                raise TimeoutError(f"nothing came for {silence:.0f} s")
            logger.warning("%s: nothing came for %.0f s of %.0f", url, silence, _SILENCE)
        return future.result()
    except FileNotFoundError as error:
        # fsspec says "not found" of all errors of web servers. What they refuse (403) may not be there, either.
        cause, error.__cause__ = error.__cause__, None
        if url.startswith(WEB) and cause and getattr(cause, "status", None) not in REFUSED:
            raise cause from None
        raise
    finally:
        future.cancel()


def read_range(url: str, fs: Any, path: str, start: int, end: int, is_whole: bool = False) -> bytes:
    """Return the bytes of an object from `start` to `end`, or fewer if it ends before. is_whole: ask for all of
    it, as an empty object has no ranges, and stop at `end`."""
    if not url.startswith((*WEB, "s3")):
        # The packages of other stores cannot stop within an object, so that its size comes first.
        end = min(end, fs.info(path)["size"]) if is_whole else end
        return fs.cat_file(path, start=start, end=end) if end > start else b""
    data, part = bytearray(), {} if is_whole else {"Range": f"bytes={start}-{end - 1}"}

    async def take(content: Any, is_part: bool) -> None:
        # A store without ranges answers with the whole object.
        while (is_part or not start) and (piece := await content.read(end - start - len(data))):
            data.extend(piece)
            _came[fs] += len(piece)

    async def request() -> None:
        if not url.startswith(WEB):
            bucket, key, _ = fs.split_path(path)
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **part)
            with closing(answer["Body"]) as content:
                return await take(content, "ContentRange" in answer)
        # A small compressed answer may unpack to any size.
        headers = {**fs.kwargs.get("headers", {}), **part, "Accept-Encoding": "identity"}
        session = await fs.set_session()
        async with session.get(fs.encode_url(path), **{**fs.kwargs, "headers": headers}) as answer:
            fs._raise_not_found_for_status(answer, path)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise StoreError(f"{url}: its server compresses it; use one that does not")
            await take(answer.content, answer.status == 206)

    waited(url, fs, request(), data)
    return bytes(data)


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
