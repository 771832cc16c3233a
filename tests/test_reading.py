"""The reader of small files: its bounds, each at its edge, and that it never waits."""

import json
import os
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from llmcli.errors import CheckpointError, UsageError
from llmcli.reading import MAX_DEPTH, MAX_DIGITS, LoneSurrogateError, SmallFile, parse_json

KIND = SmallFile("a thing", 2 * 1024**2, CheckpointError, "download it again")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_refused(path):
    path.write_bytes(b"x" * KIND.max_bytes)
    assert KIND.read_bytes(path) == b"x" * KIND.max_bytes
    path.write_bytes(b"x" * (KIND.max_bytes + 1))
    with pytest.raises(CheckpointError, match="longer than 2 MiB, too long for a thing"):
        KIND.read_bytes(path)


def test_what_is_not_a_regular_file_is_refused_at_once(path, tmp_path):
    started = time.monotonic()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file, expected a thing"):
        KIND.read_bytes(path)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    for wrong in (link, tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file, expected a thing"):
            KIND.read_bytes(wrong)
    assert time.monotonic() - started < 5


def test_a_pipe_that_takes_the_file_s_place_after_the_look_is_not_waited_for(path, monkeypatch):
    os.mkfifo(path)
    regular = os.stat(__file__)
    monkeypatch.setattr(os, "stat", lambda _: regular)
    assert KIND.read_bytes(path) == b""


def test_a_file_that_is_missing_or_has_an_impossible_name(path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        KIND.read_bytes(path)
    with pytest.raises(CheckpointError, match="not a valid path: embedded null byte"):
        KIND.read_bytes(Path("a\0b"))
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
        KIND.read_bytes(path)


def test_text_is_utf_8(path):
    path.write_bytes("é".encode())
    assert KIND.read_text(path) == "é"
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8 text; download it again"):
        KIND.read_text(path)


def test_an_object_is_an_object(path):
    path.write_text('{"a": NaN, "b": [1, "two", null]}')
    assert KIND.read_json_object(path)["b"] == [1, "two", None]
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="holds a JSON list, expected an object; download it again"):
        KIND.read_json_object(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON: .*; download it again"):
        KIND.read_json_object(path)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 100_000])
def test_nesting_is_bounded(opening, closing, depth):
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} levels deep"):
        parse_json(nested(depth, opening, closing))


def test_nesting_just_below_the_bound_is_read():
    assert parse_json(nested(MAX_DEPTH - 1, "[", "]")) == json.loads(nested(MAX_DEPTH - 1, "[", "]"))


def test_digits_are_bounded():
    assert parse_json("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] == int(1e30)
    for digits in (MAX_DIGITS + 1, 401, 5_000, 1_000_000):
        with pytest.raises(ValueError, match=f"an integer has more than {MAX_DIGITS} digits"):
            parse_json("[" + "9" * digits + "]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'"\ud800"', "it has the lone surrogate U+D800, half of a character; leave it out"),
        (r'{"\udfff": 1}', "a key has the lone surrogate U+DFFF, half"),
        (r'[{"a": ["\ud83d"]}]', "[0].a[0] has the lone surrogate U+D83D, half"),
        (r'{"messages": [{"a": "x"}, {"b": {"x\ud83d": 1}}]}', "a key of messages[1].b has the lone surrogate U+D83D"),
        (r'{"a": "x\ud83dy", "b": 1}', "a has the lone surrogate U+D83D"),
    ],
)
def test_half_a_surrogate_pair_is_refused(text, message):
    with pytest.raises(LoneSurrogateError, match=f"^{re.escape(message)}"):
        parse_json(text)
    assert parse_json(r'"\ud83d\ude00"') == "😀"


def test_toml_has_the_same_bounds(path):
    kind = SmallFile("a preset", 1024**2, UsageError, "correct the file")
    path.write_text('[sampling]\ntop_p = 0.5\nname = "x"')
    assert kind.read_toml(path) == {"sampling": {"top_p": 0.5, "name": "x"}}
    for text in (
        "a = " + nested(5_000, "[", "]"),
        "a = " + nested(70, "[", "]"),
        "a = " + "9" * 200,
        "a = ",
        "a = 1\na = 2",
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not valid TOML: .*; correct the file"):
            kind.read_toml(path)
    path.write_text("a = " + "9" * 5_000)
    with pytest.raises(UsageError, match="is not valid TOML"):
        kind.read_toml(path)


def test_a_short_file_takes_little_memory_whatever_its_kind_may_have(path):
    path.write_bytes(b"x")
    large = SmallFile("a large thing", 2**30, CheckpointError, "download it again")
    tracemalloc.start()
    try:
        assert large.read_bytes(path) == b"x"
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024**2
    finally:
        tracemalloc.stop()
