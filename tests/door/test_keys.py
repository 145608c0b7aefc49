"""Keys that rooms declare: their order, their union, and the errors that name them."""

from __future__ import annotations

from typing import Annotated

import pytest

from cogfast.core.keys import After, Keys, Share, names_origins, ordered, with_origins
from cogfast.extensions.table import ExtensionKeys
from cogfast.train.keys import GROUPS, RateKeys, TrainKeys
from tests.support.refusals import assert_refused


class First(Keys):
    """Keys of one room."""

    a: int = 1
    """the first"""
    d: Annotated[Share, After("c")] = 0.5
    """the last"""


class Second(Keys):
    """Keys of another room."""

    b: Annotated[int, After("a")] = 2
    """behind a"""
    c: int = 3
    """behind b"""


@ordered
class Both(First, Second):
    """The union of two rooms."""


def test_keys_stand_behind_the_one_that_they_name() -> None:
    assert list(Both.model_fields) == list(Both().model_dump()) == ["a", "b", "c", "d"]
    assert Both.model_fields["b"].description == "behind a"
    assert list(Both.model_json_schema()["properties"]) == ["a", "b", "c", "d"]


def test_a_key_has_one_room() -> None:
    class Third(Keys):
        b: int = 5

    with pytest.raises(AssertionError, match=r"^b: "):
        ordered(type("Three", (First, Second, Third), {"__module__": __name__}))


def test_keys_are_frozen_and_a_changed_copy_is_another() -> None:
    keys = Both(a=7)
    with pytest.raises(ValueError, match="frozen"):
        keys.a = 8  # pyright: ignore[reportAttributeAccessIssue]
    assert (keys.changed(b=9).b, keys.b) == (9, 2)


def test_an_error_of_a_key_begins_with_its_origin() -> None:
    keys, origins = RateKeys(), {"args.lr": "my.yaml"}

    def fails() -> None:
        with with_origins(origins):
            raise keys.problem("lr", "args.lr=7: too high; use 1")

    assert_refused(fails, "my.yaml: args.lr=7: too high; use 1")

    class Config:
        def __init__(self) -> None:
            self.origins = {"args.warmup": "command line"}

    @names_origins
    def check(config: Config, name: str) -> None:
        raise keys.problem(name, f"args.{name} is wrong")

    assert_refused(lambda: check(Config(), "warmup"), "command line: args.warmup is wrong")
    assert_refused(lambda: check(Config(), "lr"), "default: args.lr is wrong")


def test_args_are_the_union_of_all_rooms() -> None:
    assert {*RateKeys.model_fields, *ExtensionKeys.model_fields} < {*TrainKeys.model_fields}
    assert next(iter(TrainKeys.model_fields)) == next(iter(GROUPS))
    assert not [name for name, field in TrainKeys.model_fields.items() if not field.description]
