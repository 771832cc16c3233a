"""A dict on disk does what a dict does."""

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli.batch.on_disk import DiskDict
from llmcli.errors import OutputError

KEYS = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.sampled_from([1.0, 0.5, -0.0, 1e300, 10**300]))
STEPS = st.lists(st.tuples(st.sampled_from(["set", "delete", "get", "default"]), KEYS, st.integers(0, 9)), max_size=30)


@given(STEPS)
def test_it_is_a_dict(steps: list[tuple[str, object, int]]) -> None:
    mine, theirs = DiskDict[int](), {}
    for what, key, value in steps:
        if what == "set":
            mine[key] = theirs[key] = value  # type: ignore[index]
        elif what == "delete":
            assert mine.pop(key, None) == theirs.pop(key, None)  # type: ignore[arg-type]
        elif what == "default":
            assert mine.setdefault(key, value) == theirs.setdefault(key, value)  # type: ignore[arg-type]
        assert (key in mine, mine.get(key)) == (key in theirs, theirs.get(key))  # type: ignore[arg-type, call-overload]
        assert list(mine.items()) == list(theirs.items())
        assert len(mine) == len(theirs)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DiskDict[int]()

    class Full:
        def execute(self, *_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(found, "_db", Full())
    with pytest.raises(OutputError, match="^the temporary file of the lines' ids cannot be written: database or disk "):
        found["a"] = 1
