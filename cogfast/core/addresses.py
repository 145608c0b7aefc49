"""Texts as they are shown: addresses without user, password, query and fragment, and no tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
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
