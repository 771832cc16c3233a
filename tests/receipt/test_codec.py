"""Dataclasses as JSON: nothing is lost, and what does not fit is refused by the name of its key."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from llmcli.receipt.codec import MalformedError, Range, StringForm, from_json, to_json


@dataclass(frozen=True)
class Inner:
    number: Annotated[int, Range(1, 9)]
    word: Annotated[str, StringForm("[a-z]+", "small letters")] | None


@dataclass(frozen=True)
class Outer:
    text: str
    is_on: bool
    ratios: Mapping[str, float]
    pairs: tuple[tuple[int, float], ...]
    inner: Inner
    inners: tuple[Inner, ...]
    kind: Literal["a", "b"]


VALUE = Outer("ä\n", True, {"x": 0.5, "y": 2}, ((1, -math.inf), (2, -0.25)), Inner(3, None), (Inner(9, "z"),), "b")


def test_round_trip_through_text() -> None:
    text = json.dumps(to_json(VALUE), allow_nan=False)
    found = from_json(Outer, json.loads(text))
    assert found == VALUE
    assert [type(value) for value in found.ratios.values()] == [float, int]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("text",), 5, "text is 5, expected a string"),
        (("is_on",), 1, "is_on is 1, expected true or false"),
        (("ratios",), [], "ratios is [], expected an object"),
        (("ratios", "x"), "inf", "ratios.x is 'inf', expected a finite number"),
        (("ratios", "x"), math.nan, "ratios.x is nan, expected a finite number"),
        (("ratios", "x"), True, "ratios.x is true, expected a finite number"),
        (("pairs",), {}, "pairs is {}, expected a list"),
        (("pairs", 1), [1], "pairs[1] is [1], expected a list of 2"),
        (("pairs", 0, 0), 1.0, "pairs[0][0] is 1.0, expected an integer"),
        (("inner",), None, "inner is null, expected an object"),
        (("inner", "number"), 10, "inner.number is 10, expected an integer from 1 to 9"),
        (("inner", "number"), True, "inner.number is true, expected an integer from 1 to 9"),
        (("inner", "number"), 1.0, "inner.number is 1.0, expected an integer from 1 to 9"),
        (("inners", 0, "word"), "a\n", r"inners[0].word is 'a\n', expected small letters"),
        (("inners", 0, "word"), 1, "inners[0].word is 1, expected small letters"),
        (("inners", 0, "more"), 1, "inners[0].more is an unknown key, expected number, word"),
        (("kind",), "c", "kind is 'c', expected one of a, b"),
        (("kind",), ["a"], "kind is ['a'], expected one of a, b"),
    ],
)
def test_what_does_not_fit_is_named(path: tuple[Any, ...], value: object, message: str) -> None:
    content = to_json(VALUE)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(MalformedError, match=f"^{re.escape(message)}"):
        from_json(Outer, content)


def test_a_missing_key_and_another_root() -> None:
    content = to_json(VALUE)
    del content["inner"]["word"]
    with pytest.raises(MalformedError, match=r"^inner\.word is missing$"):
        from_json(Outer, content)
    with pytest.raises(MalformedError, match=r"^the file is \[\], expected an object$"):
        from_json(Outer, [])
