"""Finds the reason of an error of an object store, and the fix that its message names."""

from __future__ import annotations

import errno

_OTHER_REGION = "the bucket is in another region; set AWS_DEFAULT_REGION to it"
_NO_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile (S3), GOOGLE_APPLICATION_CREDENTIALS (GS) or "
    "HF_TOKEN (hf)"
)
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
NO_BUCKET = "no such bucket; create it, or correct the address"
NO_ANSWER = (
    "the store does not answer; check its address, the network, and AWS_ENDPOINT_URL (S3) or "
    "GOOGLE_APPLICATION_CREDENTIALS (GS), and try again later"
)


def diagnosis(error: Exception) -> tuple[str, str]:
    """Return the reason of an error, and its fix if repeating the call is of no use, else ""."""
    name, text = type(error).__name__, brief(error)
    cause = f"{name} {text} {error.__cause__ or ''}"
    fix = next((fix for part, fix in _PERMANENT.items() if part in cause), None)
    if fix is not None:
        return f"no credentials ({text})" if fix == _NO_CREDENTIALS else text, fix
    if isinstance(error, PermissionError) or text.startswith("Forbidden"):  # the latter of gcsfs
        return f"access denied ({text})", "check the credentials, their rights and the region"
    code = getattr(error, "errno", None)
    # S3 answers to HEAD without a text, also if a token has expired.
    if code == errno.EINVAL or name == "ParamValidationError":
        return text, "correct the address, or renew the credentials if they have expired"
    if isinstance(error, ImportError):
        return text, "install the package"
    odd = (NotImplementedError, TypeError, IsADirectoryError, FileExistsError)
    if isinstance(error, odd) or code == errno.ENOSYS:
        return text, "use another store or address"
    return text, ""


def brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
