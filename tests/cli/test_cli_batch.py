"""`llmcli batch` in this process: each line has the text of `generate`, and a run resumes where it ended."""

import io
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from batch.fake_scheduler import FakeScheduler
from results import Llmcli

from llmcli import __version__
from llmcli.cli.session import Session
from llmcli.engine import scheduler

PLAIN = ("--chat-template", "plain")
LENGTH = ("--max-new-tokens", 6)


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def results(path: Path) -> dict[Any, dict[str, Any]]:
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {value.get("custom_id", value["id"]): value for value in values}


def without_times(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in ("id", "timings")}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An input of three prompts, and the path of an output."""
    return write_lines(
        tmp_path / "in.jsonl", *({"prompt": text} for text in ("Hi", "Yes", "No"))
    ), tmp_path / "out.jsonl"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Session, "load_runner", refuse)


CHAT_URL = {"method": "POST", "url": "/v1/chat/completions"}
COMPLETION_URL = {"method": "POST", "url": "/v1/completions"}
BIAS = {"65": 100, "66": 99.5}
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # one comes soon, and stops the text


LINES: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    ({"prompt": "Grüße,\0\x1b 世界\r\n"}, ()),
    ({"prompt": ""}, ()),
    ({"prompt": "Hi", "temperature": 0}, ("--temperature", 0)),
    ({"prompt": "Hi", "top_k": 3, "repetition_penalty": 1.5}, ("--top-k", 3, "--repetition-penalty", 1.5)),
    ({"prompt": "Hi", "dry_multiplier": 1.0}, ("--dry-multiplier", 1)),
    (
        {"prompt": "Hi", "max_new_tokens": 30, "stop": [*LETTERS]},
        ("--max-new-tokens", 30, *(f"--stop={letter}" for letter in LETTERS)),
    ),
    ({"prompt": "Hi", "seed": 77}, ("--seed", 77)),
    ({"messages": [{"role": "user", "content": "Hi"}]}, ("--chat", *PLAIN)),
    (
        {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]},
        ("--chat", *PLAIN, "--system", "Be kind"),
    ),
    (
        {**COMPLETION_URL, "body": {"prompt": "Hi", "max_tokens": 3, "top_p": 0.5}},
        ("--max-new-tokens=3", "--top-p=0.5"),
    ),
    ({**COMPLETION_URL, "body": {"prompt": "Hi", "logit_bias": BIAS}}, ("--logit-bias=65=100", "--logit-bias=66=99.5")),
    ({**CHAT_URL, "body": {"messages": [{"role": "user", "content": "Hi"}]}}, ("--chat", *PLAIN)),
]


def test_a_line_tells_what_generate_tells(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    common = ("-m", tiny_llama, "--seed", 5, *LENGTH)
    lines = [
        {"custom_id": f"c{number}", **line} if "body" in line else line for number, (line, _) in enumerate(LINES, 1)
    ]
    told = llmcli("batch", write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl", *common, *PLAIN)
    assert told.exit_code == 0, told.stderr
    every = results(tmp_path / "out.jsonl")
    for number, (line, flags) in enumerate(LINES, 1):
        body = line.get("body", line)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        (tmp_path / "prompt").write_bytes(text.encode() + b"\n")
        place = () if "seed" in line else ("--only", number)
        alone = llmcli("generate", f"--file={tmp_path / 'prompt'}", *common, *place, "--json", *flags)
        expected = json.loads(alone.stdout)
        if "body" not in line:
            found = every[number]
            assert without_times(found) == without_times(expected)
            assert found.keys() == {"id", *expected}
            assert found["timings"].keys() == expected["timings"].keys()
            continue
        found = every[f"c{number}"]
        answer = found["response"]["body"]
        (choice,) = answer["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == expected["text"]
        counts = len(expected["prompt_token_ids"]), len(expected["token_ids"])
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert answer["usage"] == dict(zip(names, (*counts, sum(counts)), strict=True))
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[expected["finish_reason"]]
        assert (found["error"], found["response"]["status_code"], answer["model"]) == (None, 200, str(tiny_llama))


def test_the_runs_settings_hold_where_a_line_has_none(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    own = [{"role": "system", "content": "Own"}, *messages]
    source = write_lines(
        tmp_path / "in.jsonl", {"messages": messages}, {"messages": own}, {"prompt": "Hi", "stop": "q"}
    )
    flags = ("--preset", "story", "--stop", "e", "--max-new-tokens", 40, "-m", tiny_llama, "--seed", 5)
    assert llmcli("batch", source, tmp_path / "out", *flags, *PLAIN, "--system", "Be kind").exit_code == 0
    found = results(tmp_path / "out")
    for number, more in ((1, ("--chat", *PLAIN, "--system", "Be kind")), (2, ("--chat", *PLAIN, "--system", "Own"))):
        alone = llmcli("generate", "Hi", *flags, *more, "--only", number, "--json")
        assert without_times(found[number]) == without_times(json.loads(alone.stdout))
    replaced = [flag if flag != "e" else "q" for flag in flags]
    alone = llmcli("generate", "Hi", *replaced, "--only", 3, "--json")
    assert without_times(found[3]) == without_times(json.loads(alone.stdout))


def test_text_and_standard_streams(llmcli: Llmcli, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    arguments = ("batch", "-", "-", "-m", tiny_llama, "--seed", 5, *LENGTH, "--ordered", "--quiet")
    feed(b"\xef\xbb\xbfHi\r\n\r\n {} \n")
    told = llmcli(*arguments, "--text")
    assert (told.exit_code, told.stderr) == (0, "")
    values = [json.loads(line) for line in told.stdout.splitlines()]
    assert [value["id"] for value in values] == [1, 3]
    feed(b'{"prompt": "Hi"}\n\n{"prompt": " {} "}')
    as_objects = [json.loads(line) for line in llmcli(*arguments).stdout.splitlines()]
    assert [without_times(value) for value in as_objects] == [without_times(value) for value in values]


def test_lines_break_at_line_feeds_alone(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    """Any text of a model: here random bytes."""
    source = write_lines(tmp_path / "in.jsonl", *({"prompt": str(number)} for number in range(5)))
    llmcli(
        "batch", source, tmp_path / "out", "-m", tiny_llama, "--seed", 1, "--temperature", 5, "--max-new-tokens", 200
    )
    content = (tmp_path / "out").read_text(encoding="utf-8")
    assert len(content.splitlines()) == content.count("\n") == 5


@pytest.mark.parametrize("is_given", [True, False])
def test_a_run_goes_on(llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], is_given: bool) -> None:
    source, output = files
    arguments = ("batch", source, output, "-m", tiny_llama, *LENGTH, *(("--seed", 3) if is_given else ()))
    assert llmcli(*arguments).exit_code == 0
    whole = results(output)
    first, *_ = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first + b'{"id": 2, "te')
    told = llmcli(*arguments)
    assert told.exit_code == 0
    assert "Resumed: 1 of 3 prompts are done\n" in told.stderr
    assert f"The last line of {output} is incomplete (13 bytes); its prompt runs again\n" in told.stderr
    assert output.read_bytes().startswith(first)
    again = results(output)
    assert {key: without_times(value) for key, value in again.items()} == {
        key: without_times(value) for key, value in whole.items()
    }


def test_a_run_that_is_done_reads_no_weights(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = files
    assert llmcli("batch", source, output, "-m", tiny_llama, *LENGTH).exit_code == 0
    before = output.read_bytes()
    monkeypatch.setattr(Session, "load_runner", None)
    told = llmcli("batch", source, output, "-m", tiny_llama, *LENGTH)
    assert told.exit_code == 0
    assert f"Nothing to do: {output} holds all 3 results" in told.stderr
    assert output.read_bytes() == before


OTHER_SETTINGS = [
    (("--seed", 4), "seed 3, now 4"),
    (("--temperature", 0.5), "temperature 0.8, now 0.5"),
    (("--preset", "precise"), "temperature 0.8, now "),
    (("--max-new-tokens", 7), "max_new_tokens 6, now 7"),
    (("--stop", "x"), "stop [], now ['x']"),
    (("--context", 100), "context 512, now 100"),
    (("--ignore-eos",), "ignore_eos false, now true"),
    (("--logit-bias", "5=-inf"), "logit_bias {}, now {'5': -inf}"),
    (("--sampler-order", "temperature"), "sampler_order unset, now ['temperature']"),
    (("--dry-breaker", "none"), "dry_breakers unset, now []"),
    (("--text",), "text false, now true"),
    (("--dtype", "bfloat16"), "device 'CPU, float32, "),
]


def test_other_settings_are_refused(llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path]) -> None:
    source, output = files
    arguments = ("batch", source, output, "-m", tiny_llama, "--seed", 3, *LENGTH, "--quiet")
    assert llmcli(*arguments).exit_code == 0
    first, *_ = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first)
    remedy = "run with the same settings, or name another output"
    for flags, difference in OTHER_SETTINGS:
        llmcli(*arguments, *flags).expect_error(2, f"{output} was made with ", difference, remedy)
        assert output.read_bytes() == first


def test_another_input_model_or_version_is_refused(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = files
    copy = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    arguments = ("batch", source, output, "-m", copy, *LENGTH, "--quiet")
    assert llmcli(*arguments).exit_code == 0
    (copy / "README.md").write_text("A card changes no text.")
    assert llmcli(*arguments).exit_code == 0
    content = source.read_bytes()
    source.write_bytes(content.replace(b"Yes", b"Yet"))
    llmcli(*arguments).expect_error(2, f"{output} was made with other prompts than the input has now: ")
    source.write_bytes(content)
    llmcli(*arguments, "-m", tiny_llama).expect_error(2, "was made with model '")
    with monkeypatch.context() as context:  # another version's texts may differ
        context.setattr("llmcli.cli.batch_job.__version__", "99.1")
        llmcli(*arguments).expect_error(2, f"{output} was made with llmcli '{__version__}', now '99.1': ")
    (copy / "model.safetensors").touch()
    llmcli(*arguments).expect_error(2, "was made with file model.safetensors '", " bytes of ")
    assert len(results(output)) == 3


def test_what_fails_is_written_down_and_tried_again(
    llmcli: Llmcli, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "A"}, {"custom_id": "c", **COMPLETION_URL, "body": {"prompt": "A"}}, {"prompt": "B"}]
    source, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    arguments = ("batch", source, output, "-m", tiny_llama, *LENGTH, "--quiet")
    with monkeypatch.context() as context:
        context.setattr("llmcli.engine.scheduler.Scheduler", lambda *_, **__: FakeScheduler(failing=ord("A")))
        told = llmcli(*arguments)
    told.expect_error(1, f"2 of 3 prompts failed; see their lines in {output}; run the same command again")
    found = results(output)
    assert found[1] == {"id": 1, "error": {"message": "the card fell off"}}
    assert found["c"]["response"] is None
    assert found["c"]["error"] == {"code": "failed", "message": "the card fell off"}
    kept = found[3]
    assert llmcli(*arguments).exit_code == 0
    found = results(output)
    assert found.keys() == {1, "c", 3}
    assert found[3] == kept
    assert found[1]["text"]
    assert found["c"]["error"] is None


def test_ctrl_c_says_how_to_go_on(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = files
    failing = FakeScheduler(num_rows=1, last_step=9)
    monkeypatch.setattr("llmcli.engine.scheduler.Scheduler", lambda *_, **__: failing)
    told = llmcli("batch", source, output, "-m", tiny_llama)
    assert told.exit_code == 130
    num_ended = len(results(output))
    assert 0 < num_ended < 3
    last = f"Interrupted: {num_ended} of 3 prompts are done; run the same command again to resume"
    assert told.stderr.splitlines()[-1] == last


def test_ctrl_c_after_the_last_result_says_how_to_go_on(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted_at_its_end() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    source, output = files
    monkeypatch.setattr("llmcli.engine.scheduler.Scheduler", lambda *_, **__: FakeScheduler())
    monkeypatch.setattr("llmcli.cli.batch.loaded_objects_set_aside", interrupted_at_its_end)
    told = llmcli("batch", source, output, "-m", tiny_llama)
    assert told.exit_code == 130
    assert told.stderr.splitlines()[-1].startswith("Interrupted: 3 of 3 prompts are done; ")


def test_rows_change_no_text_and_are_counted(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    """On the CPU: auto is one row, and a number is used as given."""
    begin = "They have these letters in common, more than one page of them: "
    lengths = zip("abcdefg", range(9, 0, -1), strict=False)  # the last ends first
    lines = [{"prompt": begin + letter, "max_new_tokens": length} for letter, length in lengths]
    source = write_lines(tmp_path / "in", *lines)
    common = (source, "-m", tiny_llama, "--seed", 3, "--stats", "--ordered")
    found = []
    for rows, num_rows in (("auto", 1), ("1", 1), ("3", 3), ("200", 7)):
        output = tmp_path / rows
        told = llmcli("batch", common[0], output, *common[1:], "--rows", rows)
        assert told.exit_code == 0, told.stderr
        how = "one at a time" if num_rows == 1 else f"{num_rows} side by side"
        assert f"7 prompts, {how}\n" in told.stderr
        assert f"Done: {output} holds all 7 results\n" in told.stderr
        found.append([without_times(value) for value in results(output).values()])
        stats = {line[:15].strip(): line[15:] for line in told.stderr.splitlines()[-9:]}
        assert list(results(output)) == [*range(1, 8)]
        assert stats["prompts"] == "7 finished, 0 failed"
        assert stats.keys() >= {"load", "run", "new tokens", "drafts"}
        computed, shared = (int(part.split()[0]) for part in stats["prompt tokens"].split(","))
        assert computed + shared == sum(len(value["prompt_token_ids"]) for value in found[-1])
        assert shared >= 6 * 48
        mean, most = re.fullmatch(r"(.*) of (.*) on average", stats["rows in use"]).groups()  # type: ignore[union-attr]
        assert int(most) == num_rows
        assert num_rows * 0.5 < float(mean) <= num_rows
        tenths = [float(rows) for rows in stats["rows over time"].removesuffix(" in tenths of the run").split()]
        assert len(tenths) == 10
        assert max(tenths) >= float(mean) - 0.05
        assert max(tenths) <= num_rows
        assert stats["preemptions"] == "0"
    assert all(other == found[0] for other in found[1:])


@pytest.mark.usefixtures("no_weights")
def test_check_counts_and_writes_nothing(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = files
    told = llmcli("batch", source, output, "-m", tiny_llama, "--check", *LENGTH)
    assert told.exit_code == 0
    facts = {line[:15].strip(): line[15:] for line in told.stdout.splitlines()}
    assert facts["prompts"] == "3"
    assert facts["prompt tokens"] == "10, the longest prompt 4 (line 2)"  # a BOS and a token a letter
    assert facts["new tokens"] == "at most 18"
    assert " needed, " in facts["memory"]
    assert re.match(r"(about \d+ s|less than a second): estimated", facts["time"])
    assert "estimated for texts of full length" in facts["time"]
    assert list(tmp_path.iterdir()) == [source]


def test_newcomers_follow_no_clock(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the next token, so the number of new prompts in a step does not depend on time."""
    make, asked = scheduler.Scheduler, []

    def note(*arguments: Any, **options: Any) -> Any:
        asked.append(options["wait_seconds"])
        return make(*arguments, **options)

    monkeypatch.setattr(scheduler, "Scheduler", note)
    assert llmcli("batch", *files, "-m", tiny_llama, "--max-new-tokens", 2).exit_code == 0
    assert asked == [math.inf]


def test_an_input_from_a_named_pipe_is_read_whole_first(
    llmcli: Llmcli, tiny_llama: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = files
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(source.read_bytes()))
    writer.start()
    assert llmcli("batch", tmp_path / "pipe", output, "-m", tiny_llama, *LENGTH).exit_code == 0
    writer.join()
    assert "Nothing to do: " in llmcli("batch", source, output, "-m", tiny_llama, *LENGTH).stderr
