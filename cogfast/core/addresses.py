"""Addresses: how they are written, and texts as they are shown, without users, passwords, queries and tokens."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A quote, the scheme, and the rest up to that quote, a blank or the next address. Paths have one slash.
_SCHEME = r"(?<![a-z0-9+.-])[a-z0-9+.-]{2,}+:/"
_ADDRESS = re.compile(rf"(?i)([\"'])?({_SCHEME}/?)((?:(?!{_SCHEME}/)(?(1)(?!\1))[^\s<>])*)")
# The colon is of no port and no ARN. A / or @ may be in a password; behind :// its end may be cut off.
_LOGIN = re.compile(r"^([^/]*/(/)?+)(?!arn:)[^/@:[]*:(?!\d{1,5}(?!\w|[^/?#]*@))(?:.*@|(?(2).*|@))")
_USER = re.compile(r"(?i)^(?!abfss?:|az:|wasbs?:)([^/]*/{1,2}+)[^/?#]*@")  # Azure: a container
_TIMES = r"#t=[\d.,e+-]*(?:~[0-9a-f]{16})?$"  # of a part of a video
# Names in stores may have ? and #. There only ?key= starts a query.
_REST = re.compile(rf"(?i)^((?=[^/]*http)[^?#]*|.*?(?=\?[\w.%-]+=))(?!{_TIMES})[?#].*?({_TIMES}|$)")
_LONG = r"[\"']?(?=[^\s\"'(]{16})(?=[^\s\"']{0,99}\d)"  # a token, not a word of a sentence
_KEYS = r"secret|passw(?:or)?d|signature|sig(?<!\wsig)|(?:api|access|account|secret)[_-]?key"
_NAMES = rf"(?:{_KEYS}|token(?<!(?:pad|eos|bos|unk|sep|cls|ask)_token))"
_NAMES += rf"(?:=[\"']?|[\"']? *: *{_LONG}| *= *(?=[\"']){_LONG})"
_NAMES += rf"|bearer +{_LONG}|authorization[\"']?[:=] *[\"']?(?:basic|bearer|token) +"
_NAMES = rf"(?i:(?=[abpst])(?:{_NAMES}))|\b(?:hf|gh[a-z]|github_pat)_(?=[^\W_]{{16}})"
_TOKEN = re.compile(rf"({_NAMES})(?:(?<=[\"'])[^\"'\s][^\"'\n]{{7,}}|[^\s\"'&<>,;()\\]{{8,}})")

CACHE_VARIABLE = "COGFAST_LOCAL_CACHE"  # FOLDER or FOLDER:SIZE
OF_CHAIN = "has :: in it; use addresses of one scheme"
_CHAIN = re.compile(r"[\w+.-]+::\S*://")  # of file systems, as fsspec has them
_WRITTEN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)
_STORES = ("s3", "gs", "hf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A folder of this machine that stands for one of an object store (extensions/stores/mirror.py)
_URL = re.compile(r"/(?:runs|folders/[^/]+)/([a-z][a-z0-9+.-]*):/(.+)")


def is_url(name: str | Path) -> bool:
    return "://" in str(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` is the id of a model of the hub and no path on this machine."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def url_of(path: Path | str) -> str | None:
    """Return the URL that a path of this machine stands for; None if it is a path alone."""
    match = _URL.search(str(path))
    return None if match is None else f"{match[1]}://{'/' * (match[1] == 'file')}{match[2]}"


def name_of(path: Path | str) -> str:
    """Return the URL that a path stands for, or the path: what messages and other machines are given."""
    return url_of(path) or str(path)


def with_urls(node: Any) -> Any:
    """Return plain values with URLs in place of the folders that stand for them, for files and other machines."""
    return each_text(node, name_of)


def check_address(text: str) -> None:
    """Raise ValueError for an address without a name, or one that is not written as the stores take it."""
    if _CHAIN.match(text):
        raise ValueError(f"{text}: {OF_CHAIN}")
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        return
    scheme = match[1].lower()
    name = match[2].lstrip("/") if scheme in _STORES else match[2]  # file:///folder is an address
    if not name.strip("/"):
        raise ValueError(f"{text}: an address names a bucket or file; write {scheme}://NAME")
    rule = "an address has a scheme in small letters and two slashes"
    if text != text.strip():
        rule = "an address has no blanks around it"
    elif {".", ".."}.intersection(name.split("/")):
        name, rule = posixpath.normpath(f"/{name}")[1:], "an address has no . or .. between slashes"
    elif scheme.startswith("s3") and (key := name.partition("?versionId=")[0]) != name:
        name, rule = key, "versions of objects are not read"
    if (fixed := f"{scheme}://{name}") != text:
        raise ValueError(f"{text}: {rule}; write {fixed}")


def each_text(node: Any, change: Callable[[str], Any]) -> Any:
    """Return plain values with change(text) in place of each text but the keys of mappings."""
    if isinstance(node, dict):
        return {key: each_text(value, change) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [each_text(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def shown(node: Any) -> Any:
    """Return a text, or plain values with texts, without what may be secret in it."""
    hide = lambda text: _ADDRESS.sub(_short, text) if ":/" in text else text
    return each_text(node, lambda text: _TOKEN.sub(r"\1...", hide(text)))


def hint(text: str) -> str:
    """Return what the reader of shown(text) must know, "" if it has all of `text`."""
    return "" if shown(text) == text else " (write what is hidden: passwords, queries, tokens)"


def distinct(name: str, start: int = 0) -> str:
    """Return a name from `start` on, or the whole as it is shown, with a hash, if that leaves out something."""
    if ":/" not in name or (text := shown(name)) == name:
        return name[start:]
    # A user and a password select no file, and their hash would tell whether a guess of them is right.
    whole = _ADDRESS.sub(lambda found: _short(found, has_query=True), name)
    digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return text if text == whole else f"{text}~{digest}"


def _short(found: re.Match, has_query: bool = False) -> str:
    quote, scheme, whole = found.groups("")
    place = whole.rstrip("\\\"',;:.)]}")
    end = whole[len(place) :]  # of a sentence or a list around the address
    text = _USER.sub(r"\1", _LOGIN.sub(r"\1", scheme + place))
    return quote + (text if has_query else _REST.sub(r"\1\2", text)) + end
