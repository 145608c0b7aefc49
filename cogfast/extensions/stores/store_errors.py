"""Finds what is wrong with an address or with the answer of an object store, and the fix that the message names."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator, Mapping

_OTHER_REGION = "the bucket is in another region; set AWS_DEFAULT_REGION"
_NO_CREDENTIALS = "set {keys}"
# Part of an error that no repetition ends -> its fix
_PERMANENT = {
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "IllegalLocationConstraint": _OTHER_REGION,
    "ProfileNotFound": "set AWS_PROFILE to a profile of ~/.aws/config, or unset it",
    "InvalidRegionError": "correct AWS_DEFAULT_REGION, such as us-east-1",
    "Invalid endpoint": "write AWS_ENDPOINT_URL with http:// or https://",
    "redentials": _NO_CREDENTIALS,
    "Anonymous caller": _NO_CREDENTIALS,  # of Google
}
# Variables that set the host and the credentials, by scheme
_HOSTS = {"s3": "AWS_ENDPOINT_URL", "hf": "HF_ENDPOINT"}
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}
NO_BUCKET = "no such bucket; create it, or correct the address"
_BUSY = (
    "the store asks for fewer requests or is not available; try again later, or with fewer ranks and "
    "args.num_workers"
)
_UNKNOWN_HOSTS = ("Name or service not known", "No address associated", "nodename nor servname")
_SECONDS_OF_UNKNOWN_HOST = 5.0
REFUSED = {*range(400, 500)} - {408, 429}  # by a web server, and for good
_BAD_ADDRESS = ("ParamValidationError", "InvalidURL", "InvalidUrlClientError")
# These parts of an error's text are left out where a sentence includes it.
_FRAME = re.compile(r"^\[Errno -?\d+\] |\.$|, url=.*$|ssl:default ")
_REQUEST = re.compile(r"(https?://[^\s/\"]+)/[^\s\"]*")


class StoreError(OSError):
    """An object cannot be read or written. The text is one line: `URL: reason; fix`."""


def diagnosis(url: str, error: Exception) -> tuple[str, str, float]:
    """Return the reason of an error, its fix, and for how many seconds it is of use to repeat the call."""
    name, text, scheme = type(error).__name__, brief(error), url.partition("://")[0]
    status, region = _answer(error)
    cause = f"{name} {text} {error.__cause__ or ''}"
    fix = next((fix for part, fix in _PERMANENT.items() if part in cause), None)
    if fix == _OTHER_REGION or status == 301:
        return text, _OTHER_REGION + (f"={region}" if region else " to it"), 0
    if fix == _NO_CREDENTIALS:
        keys = _KEYS.get(scheme, "those of its package")
        return f"no credentials ({text})", fix.format(keys=keys), 0
    if fix is not None:
        return text, fix, 0
    if scheme.startswith("http") and status in REFUSED:
        fix = "correct the address, or renew it if it is a signed one"
        return f"its server refuses it ({text})", fix, 0
    if isinstance(error, PermissionError) or text.startswith("Forbidden"):  # the latter of gcsfs
        return f"access denied ({text})", "check the credentials, their rights and the region", 0
    code = getattr(error, "errno", None)
    # S3 answers to HEAD without a text, also if a token has expired.
    if code == errno.EINVAL or name in _BAD_ADDRESS:
        return text, "correct the address, or renew the credentials if they have expired", 0
    if isinstance(error, ImportError):
        return text, "install the package", 0
    odd = (NotImplementedError, TypeError, IsADirectoryError, FileExistsError)
    if isinstance(error, odd) or code == errno.ENOSYS:
        return text, "use another store or address", 0
    if status in (429, 503):
        return f"{text} ({status})", _BUSY, math.inf
    host = "".join(f", {key}" for key in [_HOSTS.get(scheme)] if key)
    if any(part in str(each) for each in _causes(error) for part in _UNKNOWN_HOSTS):
        fix = f"no host has this name; check the address{host} and the network"
        return text, fix, _SECONDS_OF_UNKNOWN_HOST
    fix = f"the store does not answer; check its address{host} and the network, and try again later"
    return text, fix, math.inf


def brief(error: Exception) -> str:
    text = _FRAME.sub("", " ".join(str(error).split()))
    return _REQUEST.sub(r"\1", text)[:200] or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _answer(error: Exception) -> tuple[int | None, str]:
    """Return the status of the store's answer, and the region that it names, or ""."""
    for cause in _causes(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, Mapping):  # of botocore
            about = answer.get("ResponseMetadata", {})
            region = about.get("HTTPHeaders", {}).get("x-amz-bucket-region")
            named = answer.get("Error", {}).get("Region") or region
            return about.get("HTTPStatusCode"), named or ""
        given = getattr(cause, "status", None), getattr(cause, "code", None)
        for status in (*given, getattr(answer, "status_code", None)):  # of aiohttp, gcsfs, httpx
            if isinstance(status, int):
                return status, ""
    return None, ""
