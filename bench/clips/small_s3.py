"""A minimal S3 server of several processes, to measure clients that are faster than moto's server.

It answers PUT, GET, HEAD and ListObjectsV2 from a folder, and checks neither signatures nor names. FOLDER/.log
gets a letter for each request: P, G, H, and L for a listing.
`python -m bench.clips.small_s3 FOLDER PORT PROCESSES`
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import os
import socket
import sys
import urllib.parse
from pathlib import Path
from xml.sax.saxutils import escape


def _listed(folder: Path, query: dict[str, str]) -> bytes:
    prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
    below = folder / prefix.rpartition("/")[0]
    names = sorted(str(p.relative_to(folder)) for p in below.rglob("*.*") if ".draft" not in p.name)
    names = [name for name in names if name.startswith(prefix)]
    start = bisect.bisect_right(names, after)
    page, rest = names[start : start + 1000], names[start + 1000 :]
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
    rows = "".join(
        f'<Contents><Key>{escape(n)}</Key><Size>1</Size><ETag>"1"</ETag>'
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for n in page
    )
    text = f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
    return f"<ListBucketResult>{text}{more}{rows}</ListBucketResult>".encode()


def _answer(root: Path, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    place, _, query = target.partition("?")
    path = root / urllib.parse.unquote(place).lstrip("/")
    if method == "PUT":
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}.draft")
        draft.write_bytes(body)
        draft.replace(path)
        return 200, b""
    if "list-type" in query:
        return 200, _listed(path, dict(urllib.parse.parse_qsl(query)))
    return (200, path.read_bytes()) if path.is_file() else (404, b"")


async def _serve(
    root: Path, log: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            given = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
            if "100-continue" in given.get("expect", ""):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(given.get("content-length", 0)))
            os.write(log, b"L" if "list-type" in target else method[:1].encode())
            status, data = _answer(root, method, target, body)
            etag = hashlib.blake2b(target.encode(), digest_size=8).hexdigest()
            text = f'HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\nETag: "{etag}"\r\n\r\n'
            writer.write(text.encode() + (b"" if method == "HEAD" else data))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _main(root: Path, port: int) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    log = os.open(root / ".log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    call = lambda reader, writer: _serve(root, log, reader, writer)
    server = await asyncio.start_server(call, sock=listener, limit=2**24)
    await server.serve_forever()


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) - 1):
        if os.fork() == 0:
            break
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
