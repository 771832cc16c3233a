"""The parser of lines: what each key becomes, and what is refused by name."""

import hashlib
import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcli.batch.input import KEYS, Line, LineReader, Problems, parse_line, read_input
from llmcli.errors import UsageError
from llmcli.sampling.params import SPECS
from llmcli.schema.constraint import CONSTRAINT_KEYS, Constraint
from llmcli.tools import TOOL_KEYS


def parse(value: Any, number: int = 1) -> Line | None:
    return parse_line(json.dumps(value).encode(), number)


def test_every_key_is_taken() -> None:
    values = {
        "prompt": "Grüße\0\x1b\u2028",
        "id": "a",
        "seed": 2**64 - 1,
        "max_new_tokens": 3,
        "stop": ["x", "y"],
        **{name: spec.default for name, spec in SPECS.items()},
    }
    assert {*values, "messages", "chat_template_kwargs", *TOOL_KEYS, *CONSTRAINT_KEYS} == set(KEYS)
    sampling = {name: spec.default for name, spec in SPECS.items()}
    assert parse(values) == Line(1, "a", "Grüße\0\x1b\u2028", None, 2**64 - 1, 3, ("x", "y"), sampling)


def test_what_a_line_is_held_to() -> None:
    values = {
        "schema": {"type": "null"},
        "json_output": True,
        "regex": "a",
        "choice": ["a", "b"],
        "grammar": "start: A",
    }
    assert values.keys() == set(CONSTRAINT_KEYS)
    for key, value in values.items():
        line = parse({"prompt": "a", key: value})
        assert line is not None
        assert line.constraint == Constraint(key, key, value)  # type: ignore[arg-type]
    assert parse({"prompt": "a", "json_output": False}) == Line(1, 1, "a")
    assert parse({"prompt": "a", "json_output": False, "regex": "b"}) == parse({"prompt": "a", "regex": "b"})


def test_what_is_not_given_is_left_to_the_run() -> None:
    assert parse({"prompt": ""}, 7) == Line(7, 7, "")
    assert parse({"prompt": "a", **dict.fromkeys(set(KEYS) - {"prompt"})}, 7) == Line(7, 7, "a")


def test_messages() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": ""}]
    line = parse({"messages": messages, "stop": "x"})
    assert line is not None
    assert (line.prompt, line.stop) == (None, ("x",))
    assert list(line.messages or ()) == messages


@pytest.mark.parametrize("line_id", ["", "ü", 0, -1, 1.5, 10**20])
def test_ids(line_id: Any) -> None:
    line = parse({"prompt": "a", "id": line_id})
    assert line is not None
    assert line.id == line_id


@pytest.mark.parametrize("content", [b"", b"  ", b"\t", b" \r"])
def test_an_empty_line_is_skipped(content: bytes) -> None:
    assert parse_line(content, 1) is None


def test_text_is_taken_as_it_stands() -> None:
    assert parse_line(b' {"prompt": 1} ', 3, is_text=True) == Line(3, 3, ' {"prompt": 1} ')
    assert parse_line(b" ", 3, is_text=True) == Line(3, 3, " ")
    assert parse_line(b"", 3, is_text=True) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "a", "temprature": 1}, "unknown key 'temprature'; did you mean temperature?"),
        ({"prompt": "a", "warmth": 1}, "unknown key 'warmth', expected prompt, messages, id, seed"),
        ({"prompt": "a", "temprature": None}, "unknown key 'temprature'"),
        ({}, "prompt and messages are both missing, expected one of them"),
        ({"prompt": None}, "prompt and messages are both missing"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt and messages are both given"),
        ({"prompt": 5}, "prompt is 5, expected a string"),
        ({"prompt": ["a"]}, r"prompt is \['a'\], expected a string"),
        ({"prompt": "a", "id": True}, "id is true, expected a string or a number"),
        ({"prompt": "a", "id": []}, r"id is \[\], expected a string or a number"),
        ({"prompt": "a", "id": float("inf")}, "id is inf, expected"),
        ({"prompt": "a", "id": float("nan")}, "id is nan, expected"),
        ({"prompt": "a", "seed": -1}, "seed is -1, expected an integer >= 0 and <= 18446744073709551615"),
        ({"prompt": "a", "seed": 2**64}, "seed is 18446744073709551616, expected"),
        ({"prompt": "a", "seed": 1.0}, "seed is 1.0, expected an integer"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0, expected an integer >= 1"),
        ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens is true, expected"),
        ({"prompt": "a", "stop": []}, r"stop is \[\], expected a string or a list of strings, none of them empty"),
        ({"prompt": "a", "stop": ""}, "stop is '', expected"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop is .*, expected"),
        ({"prompt": "a", "stop": [1]}, r"stop is \[1\], expected"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1, expected a number >= 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot', expected a number >= 0"),
        ({"prompt": "a", "top_k": 1.5}, "top_k is 1.5, expected an integer >= 0"),
        ({"messages": "Hi"}, "messages is 'Hi', expected a list such as"),
        ({"messages": []}, r"messages is \[\], expected a list such as"),
        ({"messages": ["Hi"]}, r"messages\[0\] is 'Hi', expected an object with role and content"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is null, expected a string"),
        (
            {"messages": [{"role": "user", "content": "a", "nme": "b"}]},
            r"'messages\[0\].nme' is not supported; did you mean name\?$",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            r"messages\[0\].content\[0\] is 'a', expected a part such as",
        ),
        ("Once", "'Once' is not an object, expected one such as"),
        ([], r"\[\] is not an object"),
    ],
)
def test_refusals_name_the_key_and_what_is_expected(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        parse(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"', "^not valid JSON: "),
        (
            b"Once upon a time",
            '^not valid JSON: .*as "Once upon a time" seems to be, add --text$',
        ),
        (b'{"prompt": "\\ud800"}', r"^prompt has the lone surrogate U\+D800, half of a character; leave it out$"),
        (b'{"prompt": ' + b"[" * 100_000, "^not valid JSON: nested more than 64 levels deep"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "^not valid JSON: an integer has more than 100 digits"),
        (b'{"prompt": "\xff"}', "^not UTF-8 text: byte 0xff at 12$"),
    ],
)
def test_what_is_not_json(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_line(content, 1)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b'{"prompt": "a", "seed": 1, "prompt": "a"}', "prompt"),
        (b'{"prompt": "a", "seed": null, "seed": 1}', "seed"),
        (b'{"prompt": "a", "se\\u0065d": 2, "seed": 1}', "seed"),
        (b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
        (b'{"custom_id": "a", "body": {"prompt": "", "n": 1, "n": 1}}', "n"),
    ],
)
def test_a_key_stands_once_in_an_object(content: bytes, key: str) -> None:
    """JSON keeps the last one; which one was meant is unknown."""
    problems = Problems()
    reader = LineReader(io.BytesIO(b'{"prompt": "a"}\n' + content), "in")
    assert len(list(read_input(reader, (), problems, {}, is_text=False))) == 1
    assert problems.first == [f"in line 2: the key '{key}' appears twice; keep one of them"]


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
_ANY_KEYS = st.sampled_from([*KEYS, "custom_id", "method", "url", "body", "x"])


def parsed_or_refused(content: bytes, number: int, *, is_text: bool = False) -> Line | None:
    """The line; None if it is empty, or refused by an error of ours of at most 1000 characters."""
    try:
        return parse_line(content, number, is_text=is_text)
    except UsageError as error:
        message = str(error)
    assert 0 < len(message) < 1000
    return None


# A slow machine draws slowly, which is not the parser's fault.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_PATIENT
@given(st.dictionaries(_ANY_KEYS, _JSON))
def test_any_object_is_a_line_or_is_refused_in_words(value: dict[str, Any]) -> None:
    line = parsed_or_refused(json.dumps(value).encode(), 4)
    if line is None:
        return
    assert line.number == 4
    assert (line.prompt is None) != (line.messages is None)
    if line.form == "native":
        assert value.keys() <= set(KEYS)
        given_values = {key: item for key, item in value.items() if item is not None}
        assert line.id == given_values.get("id", 4)
        assert line.sampling == {key: item for key, item in given_values.items() if key in SPECS}


@_PATIENT
@given(st.binary(), st.booleans())
def test_any_bytes_are_a_line_or_are_refused_in_words(content: bytes, is_text: bool) -> None:
    line = parsed_or_refused(content, 1, is_text=is_text)
    if line is not None and is_text:
        assert line.prompt is not None
        assert line.prompt.encode() == content


@_PATIENT
@given(st.text())
def test_a_prompt_survives_its_way_through_json(prompt: str) -> None:
    for ascii_only in (True, False):
        line = parse_line(json.dumps({"prompt": prompt}, ensure_ascii=ascii_only).encode(), 1)
        assert line is not None
        assert line.prompt == prompt


def read(content: bytes, *, is_text: bool = False) -> tuple[list[Line], Problems]:
    problems = Problems()
    return list(read_input(LineReader(io.BytesIO(content), "in"), (), problems, {}, is_text=is_text)), problems


def test_line_ends_marks_and_empty_lines() -> None:
    content = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n\n{"prompt": "b"}\r\n {"prompt": "c"}'
    lines, problems = read(content)
    assert [(line.number, line.id, line.prompt) for line in lines] == [(1, 1, "a"), (4, 4, "b"), (5, 5, "c")]
    assert problems.count == 0
    lines, _ = read(b"\xef\xbb\xbfa\r\n\r\n b \nc", is_text=True)
    assert [(line.number, line.prompt) for line in lines] == [(1, "a"), (3, " b "), (4, "c")]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (('"a"', '"a"'), "in line 2: the id 'a' is already used on line 1; give each line its own id"),
        (("1", "1.0"), "in line 2: the id 1.0 is already used on line 1; give each line its own id"),
        (("2", "null"), "in line 2: the id 2 is already used on line 1; give each line its own id"),
    ],
)
def test_an_id_stands_for_one_line(ids: tuple[str, str], message: str) -> None:
    lines, problems = read("".join(f'{{"prompt": "a", "id": {line_id}}}\n' for line_id in ids).encode())
    assert len(lines) == 1
    assert problems.first == [message]


def test_text_and_number_are_two_ids() -> None:
    assert read(b'{"prompt": "a", "id": "1"}\n{"prompt": "a", "id": 1}')[1].count == 0


def test_all_problems_are_counted_and_ten_are_kept() -> None:
    lines, problems = read(b'{"prompt": "a"}\n' + b'{"x": 1}\n' * 25 + b'{"prompt": "b"}\n')
    assert [line.prompt for line in lines] == ["a", "b"]
    assert problems.count == 25
    assert len(problems.first) == 10
    assert problems.first[0].startswith("in line 2: unknown key 'x', expected prompt, ")


# The reader of lines: numbers, line ends, byte order marks, bounds, and the digest.


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary().filter(lambda line: b"\n" not in line)), st.booleans())
def test_lines_are_those_of_split(lines: list[bytes], has_last_break: bool) -> None:
    content = b"\n".join(lines) + b"\n" * has_last_break
    reader = LineReader(io.BytesIO(content), "in")
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    expected = [line.removesuffix(b"\r") for line in expected]
    if expected:
        expected[0] = expected[0].removeprefix(b"\xef\xbb\xbf")
    assert list(reader) == list(enumerate(expected, start=1))
    assert reader.digest == hashlib.sha256(content).hexdigest()
    assert reader.num_bytes == len(content)


def test_a_long_line_is_refused_by_number() -> None:
    content = b"a\n" + b"b" * 10 + b"\n"
    assert len(list(LineReader(io.BytesIO(content), "in", max_line_bytes=11))) == 2
    with pytest.raises(UsageError, match=r"^in line 2 is longer than 0 MiB; write one prompt per line$"):
        list(LineReader(io.BytesIO(content), "in", max_line_bytes=10))


def test_an_endless_line_takes_no_more_memory_than_the_bound() -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            buffer[:] = b"y" * len(buffer)
            return len(buffer)

    tracemalloc.start()
    with pytest.raises(UsageError, match="in line 1 is longer than 1 MiB"):
        list(LineReader(io.BufferedReader(Endless()), "in", max_line_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_a_file_that_fails_is_named() -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            raise OSError(5, "Input/output error")

    with pytest.raises(UsageError, match="^in cannot be read: Input/output error$"):
        list(LineReader(io.BufferedReader(Broken()), "in"))
