"""Values that do not belong where they are put: of YAML files and of keys."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

ODD = [None, True, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e300, "", "x", float("nan"), "a" * 500]
ODD += ["\0", "../../etc/passwd", "/etc/passwd", "\x1b[2J\n", "${oc.env:HOME}", [], {}, [1], [[]]]
ODD += [[1] * 100, {"a": 1}, {"target": "torch.os.system"}, "${args.lr}", "???", "2026-13-45"]
_LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
TEXTS = [  # whole files, and values of the command line
    "5",
    "args: [",
    "a: &a [*a]",
    _LAUGHS,
    "args: " + "[" * 2500,
    "args: {" + "k" * 2000 + ": 1}",
    "args: {x: ${args.y}, y: ${args.x}}",
    "args: !!python/object/apply:os.system [x]",
    "? [1, 2]\n: 3",
    "args: {1: 2, on: 3, null: 4}",
    "args: {seed: " + "9" * 1000 + "}",
    "%YAML 9.9\n---\nargs: {}",
    "--- 1\n--- 2",
]


def odd_value(value: object, draw: random.Random) -> object:
    """Return a JSON value with one entry changed, removed or added."""
    places = list(_places(value))
    if not places or draw.random() < 0.05:
        return copy.deepcopy(draw.choice(ODD))
    container, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.3 and isinstance(container[key], int | float):  # the right type gets further
        container[key] *= draw.choice((0, -1, 3, 1000, 10**9, 0.5))
    elif kind < 0.6:
        container[key] = copy.deepcopy(draw.choice(ODD))
    elif kind < 0.8:
        del container[key]
    elif kind < 0.85:
        container[key] = {"a": [container[key]] * 5}
    elif isinstance(container, dict):
        container[draw.choice(["x", "../x", "a" * 300, str(key) + "2"])] = container[key]
    return value


def _places(value) -> Iterator[tuple]:
    """(container, key) of everything in a JSON value."""
    keys = value if isinstance(value, dict) else ()
    for key in list(range(len(value)) if isinstance(value, list) else keys):
        yield value, key
        yield from _places(value[key])


def plain_values(schema: dict) -> list[str]:
    """Return values that the JSON schema of a key allows, as words of a command line."""
    found: list[str] = []
    for one in (schema, *schema.get("anyOf", ())):
        kind = one.get("type")
        found += [str(word) for word in one.get("enum", ())]
        if kind == "boolean":
            found += ["true", "false"]
        elif kind == "integer":
            low, high = one.get("minimum", -3), one.get("maximum", 10**6)
            found += [
                str(n) for n in sorted({low, min(low + 1, high), min(2, high), min(16, high)})
            ]
        elif kind == "number":
            low, high = one.get("minimum", -1), one.get("maximum", 10)
            found += [f"{low:g}", f"{min(0.5, high):g}", f"{min(3, high):g}"]
        elif kind == "null":
            found += ["null"]
        elif kind == "string" and "enum" not in one:
            found += ["word", "a/b"]
        elif kind == "array":
            inner = plain_values(one.get("items", {}))
            found += ["[]", f"[{inner[0]}]" if inner else "[1]"]
    return list(dict.fromkeys(found))


def wrong_values(schema: dict, draw: random.Random) -> list[str]:
    """Return values most of which the schema of a key forbids."""
    found = [
        "often",
        "true",
        "-1",
        "1.5",
        "[1]",
        "{a: 1}",
        "''",
        "null",
        "1e400",
        "${args.x}",
        "???",
    ]
    for one in (schema, *schema.get("anyOf", ())):
        if "maximum" in one:
            found += [f"{one['maximum'] * 10:g}", f"{one['minimum'] - 1:g}"] * 2
        for word in one.get("enum", ())[:1]:
            found += [str(word)[:-1], str(word).upper()] * 2
    return found
