"""What `llmcli batch` refuses before a weight is read: each input, output and flag with its place and the remedy."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from results import Llmcli, Result

from llmcli.cli.session import Session


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Session, "load_runner", refuse)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    return path


@pytest.fixture
def batch(llmcli: Llmcli, tiny_llama: Path, source: Path, tmp_path: Path) -> Llmcli:
    """Run with that input and a new output; afterwards no other file may be there."""

    def call(*flags: object, content: bytes | None = None, output: object = tmp_path / "out") -> Result:
        if content is not None:
            source.write_bytes(content)
        before = {path.name for path in tmp_path.iterdir()}
        result = llmcli("batch", source, output, "-m", tiny_llama, "--quiet", *flags)
        assert {path.name for path in tmp_path.iterdir()} == before
        return result

    return call


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ({"prompt": "Hi", "temp": 1}, ("line 2: unknown key 'temp', expected prompt, messages, id, ",)),
        (
            {"prompt": "Hi", "max_new_tokens": 600},
            ("line 2: the prompt has 3 tokens", "--max-new-tokens is 600; the context holds 512"),
        ),
        ({"prompt": "Hi" * 300}, ("line 2: the prompt has 601 tokens; the context holds 512",)),
        ({"messages": [{"role": "user", "content": "Hi"}]}, ("has no chat template",)),
        ({"custom_id": "a"}, ("line 2: method is missing",)),
        (
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "", "logit_bias": {"999": 1}},
            },
            ("line 2: logit_bias names token 999, expected 0 to 287",),
        ),
        (
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "", "model": "gpt-4o"}},
            ("line 2: body.model is 'gpt-4o', expected '", "or 'tiny-llama'"),
        ),
    ],
)
def test_one_problem_is_one_line(batch: Llmcli, line: Any, parts: tuple[str, ...]) -> None:
    batch(content=b"\n" + json.dumps(line).encode()).expect_error(2, *parts)


def test_a_line_against_the_runs_sampler_order(batch: Llmcli) -> None:
    content = b'{"prompt": "Hi"}\n{"prompt": "Hi", "min_p": 0.5}'
    batch("--sampler-order", "temperature", content=content).expect_error(
        2, "line 2: the sampler order leaves out min_p"
    )


def test_a_template_that_refuses_one_conversation(batch: Llmcli, tmp_path: Path) -> None:
    source = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}"
    (tmp_path / "t.jinja").write_text(source)
    message = {"role": "user", "content": "Hi"}
    lines = [{"messages": [message]}, {"messages": [message, message]}]
    content = "\n".join(map(json.dumps, lines)).encode()
    batch("--chat-template", tmp_path / "t.jinja", content=content).expect_error(2, "in.jsonl line 2: ", "one only")


def test_a_template_that_leaves_a_role_out(batch: Llmcli, tmp_path: Path) -> None:
    """In either form; `developer` is `system`."""
    known = "{% for one in messages if one.role in ['system', 'user'] %}{{ one.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(known)
    talks = [[{"role": role, "content": "a"}, {"role": "user", "content": "a"}] for role in ("developer", "ipython")]
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    answered = [{"role": "assistant", "content": "a"}, *talks[0]]
    for refused, role in (
        ({"messages": talks[1]}, "ipython"),
        ({**asked, "body": {"messages": answered}}, "assistant"),
    ):
        content = "\n".join(map(json.dumps, [{"messages": talks[0]}, refused])).encode()
        told = batch("--chat-template", tmp_path / "t.jinja", content=content)
        told.expect_error(2, "in.jsonl line 2: ", "leaves out message 1 of ", f"whose role is '{role}'")


def test_many_problems_are_counted_and_ten_are_shown(batch: Llmcli) -> None:
    told = batch(content=b'{"prompt": "Hi"}\n' + b'{"prompt": "Hi", "x": 1}\n' * 12 + b'{"prompt": "Hi", "id": 1}')
    lines = told.stderr.splitlines()
    assert (told.exit_code, told.stdout, len(lines)) == (2, "", 11)
    for number, line in enumerate(lines[:10], start=2):
        assert f"in.jsonl line {number}: unknown key 'x', expected " in line
    assert lines[10].startswith("error: no prompt was run: 13 lines of ")
    assert lines[10].endswith("in.jsonl are invalid (the first 10 are shown); correct them and run again")


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_an_input_without_prompts(batch: Llmcli, content: bytes) -> None:
    batch(content=content).expect_error(2, "in.jsonl holds no prompts")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rows", "0"), "--rows is '0', expected a number from 1 to 256, or auto"),
        (("--rows", "257"), "--rows is '257', expected a number from 1 to 256, or auto"),
        (("--rows", "many"), "--rows is 'many', expected a number from 1 to 256, or auto"),
        (("--rows", "9" * 30), "expected a number from 1 to 256, or auto"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--logit-bias", "999=1"), "--logit-bias names token 999"),
        (("--stop", ""), "--stop is empty"),
        (("--context", "600"), "--context 600 is over the context limit of tiny-llama, 512 tokens"),
        (("--preset", "none such"), "none such"),
        (("--system", "Be kind"), "--system, --chat-template and --template-var are for lines with messages; "),
        (("--chat-template", "plain"), "--chat-template and --template-var are for lines with messages; "),
        (("--template-var", "a=1"), "--template-var are for lines with messages; "),
        (("--device", "gpu"), "--device is 'gpu'"),
        (("--stats=start",), "--stats is 'start', expected no value"),
    ],
)
def test_flags(batch: Llmcli, flags: tuple[str, ...], message: str) -> None:
    batch(*flags).expect_error(2, message)


def test_inputs_that_cannot_be_read(llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llmcli("batch", tmp_path / "missing", tmp_path / "out").expect_error(2, "missing' cannot be read: No such file")
    llmcli("batch", tmp_path, tmp_path / "out").expect_error(2, "cannot be read: Is a directory")
    llmcli("batch", "a\0b", tmp_path / "out").expect_error(2, "cannot be read: embedded null byte")
    monkeypatch.setattr(sys, "stdin", None)
    llmcli("batch", "-", tmp_path / "out").expect_error(2, "standard input is closed; name a file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", ["same", "symbolic", "hard", "case"])
def test_the_output_is_not_the_input(batch: Llmcli, source: Path, tmp_path: Path, link: str) -> None:
    output = tmp_path / "out"
    if link == "symbolic":
        output.symlink_to(source)
    elif link == "hard":
        os.link(source, output)
    else:
        output = source if link == "same" else tmp_path / "." / "in.jsonl"
    batch(output=output).expect_error(2, "is also the input; name another output")
    assert source.read_text() == '{"prompt": "Hi"}\n'


def test_standard_input_from_the_output(
    llmcli: Llmcli, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with source.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        llmcli("batch", "-", source).expect_error(2, "is also the input; name another output")


@pytest.mark.parametrize("name", ["out", "out.run.json", ".out.lock"])
def test_files_of_somebody_else_stay(batch: Llmcli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    told = batch()
    assert told.exit_code == 2
    assert name in told.stderr
    assert (tmp_path / name).read_text() == "mine"


def test_outputs_that_cannot_be(batch: Llmcli, tmp_path: Path) -> None:
    batch(output=tmp_path).expect_error(2, "is not a regular file; name one, or `-` for standard output")
    batch(output="/dev/null").expect_error(2, "is not a regular file")
    batch(output=tmp_path / "no" / "out").expect_error(2, "no is not a folder")
    batch(output="a\0b").expect_error(2, "is not a valid path: embedded null byte")
    batch(output=tmp_path / ("x" * 300)).expect_error(2, "cannot be written: File name too long")
    batch(output=tmp_path / ("x" * 250)).expect_error(2, "cannot be written: File name too long")


def test_standard_input_that_ends_at_once(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    llmcli("batch", "-", "-", "-m", tiny_llama, "-q").expect_error(2, "standard input holds no prompts")


def test_check_finds_the_same_problems(batch: Llmcli) -> None:
    batch("--check", content=b'{"prompt": 1}').expect_error(2, "line 1: prompt is 1, expected a string")
