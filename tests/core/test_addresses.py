"""Texts with addresses and tokens are shown without their secrets."""

import json

import pytest

from cogfast.core.addresses import distinct, shown
from cogfast.core.values import cut, one_line, show

SECRET = "sEcReT0123456789WoRd"
WEB = "https://"
# Addresses with the secret at each place, and what is shown of them
CASES = {
    "a user and a password": (f"{WEB}me:{SECRET}@host/a.mp4", f"{WEB}host/a.mp4"),
    "a user alone": (f"s3://{SECRET}@bucket/a.mp4", "s3://bucket/a.mp4"),
    "a user in place of a password": (f"{WEB}{SECRET}:x@host/a", f"{WEB}host/a"),
    "a password with odd characters": (f"s3://AKIA:/+{SECRET}@/@bucket/a", "s3://bucket/a"),
    "a password without an end": (f"see {WEB}me:{SECRET}", f"see {WEB}"),
    "a password that is cut": (f"{WEB}me:{SECRET}...0.mp4", f"{WEB}"),
    "a password beside a container": (f"abfs://me:{SECRET}@host/a", "abfs://host/a"),
    "large letters": (f"HTTPS://me:{SECRET}@HOST/a", "HTTPS://HOST/a"),
    "a signed one": (
        f"{WEB}host:80/a.mp4?X-Amz-Signature={SECRET}&x=1",
        f"{WEB}host:80/a.mp4",
    ),
    "a query of one word": (f"{WEB}host/a.mp4?{SECRET}", f"{WEB}host/a.mp4"),
    "a signed object": (f"gs://b/Who?#1.mp4?x=1&sig={SECRET}#t=1", "gs://b/Who?#1.mp4#t=1"),
    "one number in six": (f"{WEB}me:{SECRET}@[2001:db8::1]:80/a", f"{WEB}[2001:db8::1]:80/a"),
    "a number as a password": (f"{WEB}{SECRET}:123@host:80/a", f"{WEB}host:80/a"),
    "a fragment": (f"{WEB}host/a#{SECRET}", f"{WEB}host/a"),
    "a part of a signed video": (f"{WEB}host/a?{SECRET}#t=0,5.5", f"{WEB}host/a#t=0,5.5"),
    "the path of a copy": (
        f"/c/folders/1-a/https:/host/a?{SECRET}",
        "/c/folders/1-a/https:/host/a",
    ),
    "a path of Python": (f"s3:/me:{SECRET}@bucket/a", "s3:/bucket/a"),
    "a list": (f"[s3://b/x,s3://me:{SECRET}@b/y?sig={SECRET}]", "[s3://b/x,s3://b/y]"),
    "two in one": (f"{WEB}p/?url={WEB}u:{SECRET}@h/", f"{WEB}p/{WEB}h/"),
    "a sentence": (f"({WEB}host/a?{SECRET}): denied", f"({WEB}host/a): denied"),
    "a word of a shell": (f"'args.load={WEB}h/a?{SECRET}' b", f"'args.load={WEB}h/a' b"),
    "JSON": (json.dumps({"a": f"{WEB}h?{SECRET}", "b": 1}), f'{{"a": "{WEB}h", "b": 1}}'),
    "a key and a value": (f"password={SECRET}; x", "password=...; x"),
    "a key of a store": (f"AWS_SECRET_ACCESS_KEY={SECRET} x", "AWS_SECRET_ACCESS_KEY=... x"),
    "a line of YAML": (f"+  api_key: {SECRET}", "+  api_key: ..."),
    "words in quotes": (f'password="a b, {SECRET}" x', 'password="..." x'),
    "a line of Python": (f'+API_KEY = "{SECRET}"', '+API_KEY = "..."'),
    "a mapping": (f"{{'auth_token': '{SECRET}', 'b': 1}}", "{'auth_token': '...', 'b': 1}"),
    "a header": (f"Authorization: Bearer {SECRET}", "Authorization: Bearer ..."),
    "a header of a name": (f"authorization: Basic {SECRET}", "authorization: Basic ..."),
    "a bearer": (f"the bearer {SECRET}", "the bearer ..."),
    "a token of the hub": (f"hf_{SECRET}", "hf_..."),
    "a token of a forge": (f"ghp_{SECRET}, x", "ghp_..., x"),
}
PLAIN = [
    "s3://bucket/clips/s-{000..099}.tar",
    "hf://datasets/me/data@main/a b.mp4",
    "abfs://container@account.dfs.core.windows.net/a",
    "http://[::1]:8080/a",
    "http://127.0.0.1:8080/a/b@2x.mp4",
    "s3://bucket/a.mp4#t=1,2.5",
    "set HF_HUB_OFFLINE or HF_TOKEN: docs/data.md",
    "/data/clip#1?.mp4",
    "s3://bucket/Episode#3.mp4",
    "gs://bucket/What?.mp4 and hf://datasets/me/data/Who? #1.mp4",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/x/a@2x.mp4",
    "http://127.0.0.1:80|http://[::1]:8080) tcp://[::1]:29500, file:///data/12:30#1.mp4",
    "PYTHONPATH=/a/lib:/x:/y docker run -v /data:/mnt:ro",
    "a standard bearer sprinting-through the crowd of 1789",
    "pad_token=[PADDING], eos_token=endoftext, mask_token: '<a-long-mask-token-1>'",
    "a: b/c, 12:30",
]


@pytest.mark.parametrize("name", CASES)
def test_secrets_are_not_shown(name: str) -> None:
    text, wanted = CASES[name]
    assert shown(text) == wanted and shown(wanted) == wanted
    # A cut, a quoted value and a value within others.
    for found in (show(text), show([text]), show({"a": {"b": [text]}}), cut(text, 30)):
        assert SECRET not in found and SECRET[:6] not in found and SECRET[-6:] not in found
    for size in (0, 100, 300):
        assert SECRET[:6] not in one_line(f"{'x ' * size}{text}{' x' * size}")


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay(text: str) -> None:
    assert shown(text) == distinct(text) == text
    assert shown({"a": [text, 1, None], text: 2.5}) == {"a": [text, 1, None], text: 2.5}


def test_files_with_one_shown_address_have_several_names() -> None:
    names = [f"{WEB}host/get?id={i}&key={SECRET}" for i in range(100)]
    found = [distinct(name) for name in names]
    assert len({*found}) == 100 and not any(SECRET in name for name in found)
    assert [distinct(name) for name in found] == found == [shown(name) for name in found]
    # The name of entries of caches that are there
    assert distinct(f"{WEB}host/get?id=1") == f"{WEB}host/get~96042ab5cdc38920"


@pytest.mark.parametrize("user", [f"me:{SECRET}@", f"{SECRET}@"])
def test_a_name_does_not_depend_on_the_password(user: str) -> None:
    for name in ("https://{}host/get?id=1", "s3://{}bucket/a.mp4"):
        assert distinct(name.format(user)) == distinct(name.format(""))


@pytest.mark.soak
@pytest.mark.parametrize("quote", ["", "'", '"'])
@pytest.mark.parametrize("behind", ["", ":", ")", ",", "; x", "]", "\n"])
@pytest.mark.parametrize("name", CASES)
def test_secrets_are_not_shown_within_any_text(name: str, quote: str, behind: str) -> None:
    text = f"a {quote}{CASES[name][0]}{quote}{behind}"
    assert SECRET not in shown(text) and shown(shown(text)) == shown(text)
