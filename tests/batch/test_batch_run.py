"""Batches: runs, their output, its record and its ids on disk, estimates, and rows over time."""

import json
import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch.fake_scheduler import FakeScheduler, length_of, text_of
from hypothesis import given
from hypothesis import strategies as st

from llmcli.batch.output import DiskDict, InOrder, Journal, Written, holds_something, read_output
from llmcli.batch.run import Progress, RowsOverTime, estimate_seconds, run_batch
from llmcli.batch.shards import (
    Record,
    check_record_path,
    load_record,
    record_path,
    refuse_other_settings,
    save_record,
)
from llmcli.engine.request import Failed, Finished, Request
from llmcli.errors import DeviceError, OutputError, UsageError
from llmcli.sampling.params import Sampler, SamplingParams

NUM_PROMPTS = 12


def request_of(number: int) -> Request:
    return Request((number * 5, number), Sampler(SamplingParams(), seed=7), (number,), 100)


def result_line(number: int, event: Finished | Failed) -> str:
    if isinstance(event, Failed):
        return json.dumps({"id": number, "error": {"message": str(event.error)}}) + "\n"
    return json.dumps({"id": number, "text": event.text, "token_ids": event.token_ids}) + "\n"


def expected_line(number: int) -> str:
    request = request_of(number)
    token_ids = list(range(length_of(request)))
    return json.dumps({"id": number, "text": text_of(request), "token_ids": token_ids}) + "\n"


def run_to_file(path: Path, *, is_ordered: bool = False, scheduler: FakeScheduler | None = None) -> Written:
    """Do what the command does with a file; return what was found in it."""
    known = {number: number for number in range(NUM_PROMPTS)}
    written = read_output(path, known) if path.exists() else Written()
    todo = [number for number in known if number not in written.done]
    journal = Journal(path, written)
    in_order = InOrder(iter(todo), journal.append) if is_ordered else None
    put = journal.append if in_order is None else in_order.put
    try:
        run_batch(
            scheduler or FakeScheduler(),
            todo,
            request_of,
            lambda number, event: put(number, result_line(number, event)),
            Progress(),
        )
        if is_ordered:
            journal.sort(list(known))
    finally:
        if in_order is not None:
            in_order.flush()
        journal.close()
    return written


EXPECTED = [expected_line(number) for number in range(NUM_PROMPTS)]


def test_every_prompt_has_its_result_in_the_order_in_which_they_end(tmp_path: Path) -> None:
    run_to_file(tmp_path / "out")
    lines = (tmp_path / "out").read_text().splitlines(keepends=True)
    assert sorted(lines) == sorted(EXPECTED)
    assert lines != EXPECTED


def test_ordered(tmp_path: Path) -> None:
    run_to_file(tmp_path / "out", is_ordered=True)
    assert (tmp_path / "out").read_text() == "".join(EXPECTED)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_kill_at_every_byte_of_the_last_two_lines(tmp_path: Path, is_ordered: bool) -> None:
    run_to_file(tmp_path / "whole", is_ordered=is_ordered)
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)
    begin = len(whole) - len(lines[-1]) - len(lines[-2])
    path = tmp_path / "out"
    for length in range(begin, len(whole) + 1):
        path.write_bytes(whole[:length])
        written = run_to_file(path, is_ordered=is_ordered)
        assert written.torn == length - max(
            mark for mark in (begin, begin + len(lines[-2]), len(whole)) if mark <= length
        )
        assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines()), length
        if is_ordered:
            assert path.read_bytes() == whole, length


def test_a_ctrl_c_after_every_step(tmp_path: Path) -> None:
    for last_step in range(30):
        path = tmp_path / f"out{last_step}"
        for _ in range(60):  # each run does a few steps and is interrupted
            try:
                run_to_file(path, is_ordered=last_step % 2 == 1, scheduler=FakeScheduler(last_step=last_step))
                break
            except KeyboardInterrupt:
                before = path.read_bytes()
                assert before.endswith(b"\n") or not before
            if last_step < 8:  # too few for the longest text: the last run is undisturbed
                run_to_file(path, is_ordered=last_step % 2 == 1)
                break
        lines = path.read_text().splitlines(keepends=True)
        assert (lines if last_step % 2 else sorted(lines)) == (EXPECTED if last_step % 2 else sorted(EXPECTED))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_what_failed_is_tried_again(tmp_path: Path, is_ordered: bool) -> None:
    path = tmp_path / "out"
    path.touch(mode=0o640)
    mode = path.stat().st_mode
    run_to_file(path, is_ordered=is_ordered, scheduler=FakeScheduler(failing=4))
    failed = [json.loads(line) for line in path.read_text().splitlines() if "error" in line]
    assert failed == [{"id": 4, "error": {"message": "the card fell off"}}]
    assert len(path.read_text().splitlines()) == NUM_PROMPTS
    written = run_to_file(path, is_ordered=is_ordered)
    assert written.failed == {4}
    lines = path.read_text().splitlines(keepends=True)
    assert (lines if is_ordered else sorted(lines)) == (EXPECTED if is_ordered else sorted(EXPECTED))
    assert path.stat().st_mode == mode
    assert list(tmp_path.iterdir()) == [path]


def test_a_request_that_cannot_be_made_fails_alone() -> None:
    def make(number: int) -> Request:
        if number == 1:
            raise UsageError("not this one")
        return request_of(number)

    taken: dict[int, Finished | Failed] = {}
    progress = Progress()
    run_batch(FakeScheduler(), range(3), make, taken.__setitem__, progress)
    assert isinstance(taken[1], Failed)
    assert {type(taken[0]), type(taken[2])} == {Finished}
    assert (progress.num_finished, progress.num_failed) == (2, 1)
    assert progress.num_tokens == length_of(request_of(0)) + length_of(request_of(2))


def test_prompts_are_fed_as_they_are_wanted() -> None:
    scheduler = FakeScheduler(num_rows=4)
    made: list[int] = []
    ended: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    def take(number: int, event: object) -> None:
        ended.append(number)
        assert len(made) - len(ended) <= 2 * 4

    run_batch(scheduler, tasks(), request_of, take, Progress())
    assert len(ended) == 1000
    assert scheduler.most_waiting <= 4
    assert scheduler.usage.row_steps / scheduler.usage.steps > 3.9  # no row was empty


def test_an_error_of_the_scheduler_ends_the_run() -> None:
    class Broken(FakeScheduler):
        def step(self) -> list[Failed]:  # type: ignore[override]
            raise DeviceError("gone")

    with pytest.raises(DeviceError, match="gone"):
        run_batch(Broken(), [1], request_of, lambda number, event: None, Progress())


def test_a_result_that_never_comes_is_noticed() -> None:
    class Forgetful(FakeScheduler):
        def step(self) -> list[Failed]:  # type: ignore[override]
            self.waiting.clear()
            return []

    with pytest.raises(RuntimeError, match="idle and 1 prompts have no result"):
        run_batch(Forgetful(), [1], request_of, lambda number, event: None, Progress())


def test_no_tasks() -> None:
    run_batch(FakeScheduler(), [], request_of, lambda number, event: None, Progress())


# The file of results: what is found in it, and that it grows by whole lines only.


KNOWN: dict[Any, int] = {"a": 1, "b": 2, 3: 3}


def line(line_id: object, **values: object) -> str:
    return json.dumps({"id": line_id, "text": "ü", **values}, ensure_ascii=False) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_bytes("".join(lines).encode())
    return path


def test_places_are_those_of_the_lines(tmp_path: Path) -> None:
    lines = [line(3), line("b", error={"message": "x"}), line("a", error=None)]
    path = write(tmp_path / "out", *lines)
    written = read_output(path, KNOWN)
    content = path.read_bytes()
    assert [content[begin : begin + size].decode() for begin, size in written.places.values()] == lines
    assert list(written.places) == [3, "b", "a"]
    assert (written.failed, written.done, written.torn) == ({"b"}, {3, "a"}, 0)


def test_openai_results_have_their_custom_id(tmp_path: Path) -> None:
    path = write(tmp_path / "out", line("batch_req_1", custom_id="a", error=None))
    assert read_output(path, KNOWN).done == {"a"}


@pytest.mark.parametrize(
    "torn", ['{"id": 3', "\0\0\0", "{}", line(3)[:-1], "nonsense\n", "[]\n", "\n", '{"id": true}\n']
)
def test_a_torn_last_line_is_found_and_cut_off(tmp_path: Path, torn: str) -> None:
    path = write(tmp_path / "out", line("a"), torn)
    written = read_output(path, KNOWN)
    assert (written.done, written.torn) == ({"a"}, len(torn.encode()))
    journal = Journal(path, written)
    assert path.read_text() == line("a")
    journal.append(3, line(3))
    journal.close()
    assert path.read_text() == line("a") + line(3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((line("x"), line("a")), "out line 1 has the id 'x', which is not in the input"),
        ((line("a"), line(3), line("a")), "out line 3 has the id 'a' a second time"),
        ((line("a"), "nonsense\n", line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), "\n", line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), '{"text": "b"}\n', line("b")), "out line 2 is not a result of llmcli batch"),
        ((line("a"), line("3"), line("b")), "out line 2 has the id '3', which is not in the input"),
    ],
)
def test_what_no_run_has_written_is_refused_with_its_place(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path / "out", *lines)
    content = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        read_output(path, KNOWN)
    assert path.read_bytes() == content


def test_short_writes_become_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, content: real(file, content[:3]))
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    journal.close()
    assert (tmp_path / "out").read_text() == line("a")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real = os.write
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    calls: list[int] = []

    def fail_half_way(file: int, content: memoryview) -> int:
        calls.append(len(content))
        if len(calls) == 2:
            raise error
        return real(file, content[:5])

    monkeypatch.setattr(os, "write", fail_half_way)
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        journal.append("b", line("b"))
    monkeypatch.undo()
    assert (tmp_path / "out").read_text() == line("a")
    journal.append("b", line("b"))
    journal.close()
    assert (tmp_path / "out").read_text() == line("a") + line("b")


def test_sorting_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path, Written())
    for line_id in (3, "b", "a"):
        journal.append(line_id, line(line_id))
    journal.sort(["a", "b", 3, "not there"])
    assert path.read_text() == line("a") + line("b") + line(3)
    journal.append("not there", line("later"))
    journal.close()
    assert path.read_text() == line("a") + line("b") + line(3) + line("later")
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_in_order_is_not_written_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", Written())
    journal.append("a", line("a"))
    inode = (tmp_path / "out").stat().st_ino
    journal.sort(["a", "b"])
    journal.close()
    assert (tmp_path / "out").stat().st_ino == inode


def test_what_an_output_may_be(tmp_path: Path) -> None:
    assert not holds_something(tmp_path / "new")
    assert not holds_something(write(tmp_path / "empty"))
    assert holds_something(write(tmp_path / "full", "x"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="is not a regular file; name one, or `-` for standard output"):
            holds_something(path)
    with pytest.raises(UsageError, match="missing is not a folder"):
        holds_something(tmp_path / "missing" / "out")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        holds_something(tmp_path / "full" / "out")


@given(st.permutations(range(8)), st.integers(0, 8))
def test_order_is_kept_whatever_comes_first(order: list[int], num_ended: int) -> None:
    written: list[object] = []
    in_order = InOrder(iter(range(8)), lambda line_id, _: written.append(line_id))
    for count, number in enumerate(order[:num_ended], start=1):
        in_order.put(number, "")
        ended = order[:count]
        assert written == list(range(next(n for n in range(9) if n not in ended)))
    in_order.flush()
    assert written == sorted(order[:num_ended])


# The record of the settings: kept exactly, and compared setting by setting.


SETTINGS = {"temperature": 0.1 + 0.2, "stop": ["a"], "logit_bias": {"5": -math.inf}, "system": None, "text": False}


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record(SETTINGS, 2**64 - 1, "CPU, float32")
    save_record(tmp_path / "out", record)
    assert load_record(tmp_path / "out") == record
    assert [path.name for path in tmp_path.iterdir()] == ["out.run.json"]
    refuse_other_settings(tmp_path / "out", record.settings, {**SETTINGS, "stop": ("a",)})


def test_differences_are_named_with_both_values() -> None:
    new = {**SETTINGS, "temperature": 1.0, "system": "Be kind"}
    with pytest.raises(UsageError) as caught:
        refuse_other_settings(Path("out"), SETTINGS, new)
    assert str(caught.value) == (
        "out was made with temperature 0.30000000000000004, now 1.0; system unset, now 'Be kind': "
        "run with the same settings, or name another output"
    )


def test_of_many_differences_three_are_named() -> None:
    with pytest.raises(UsageError, match="a 1, now 2; b 1, now 2; c 1, now 2; and 2 more differences: "):
        refuse_other_settings(Path("out"), dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "out exists, but out.run.json with its settings is missing; name another output"),
        ("", "is not valid JSON"),
        ("[]", "holds a JSON list, expected an object"),
        ("{}", "is not a record of this version of llmcli batch"),
        ('{"format": "llmcli batch", "version": 2}', "is not a record of this version of llmcli batch"),
        ('{"format": "llmcli batch", "version": 1}', "is damaged: settings, seed or runner is missing"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        record_path(tmp_path / "out").write_text(content)
    with pytest.raises(UsageError, match=message):
        load_record(tmp_path / "out")


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    path = record_path(tmp_path / "out")
    path.write_text(json.dumps({"mine": True}))
    for attempt in (
        lambda: check_record_path(tmp_path / "out"),
        lambda: save_record(tmp_path / "out", Record({}, 1, "")),
    ):
        with pytest.raises(UsageError, match=r"out.run.json exists and is not the record of an llmcli batch"):
            attempt()
    assert json.loads(path.read_text()) == {"mine": True}


# The estimate of a batch's time: the sum of the prompts and of the decode steps, on a machine of round numbers.


class RoundMachine:
    """A prompt takes a second a token, a step 10 seconds and a second for every 100 tokens of depth."""

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        return 0

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        return 10 + depth / 100

    def prefill_seconds(self, num_tokens: int) -> float | None:
        return float(num_tokens)

    def first_token_seconds(self, num_tokens: int) -> float | None:
        return float(num_tokens)


@pytest.mark.parametrize(
    ("prompts", "num_rows", "seconds"),
    [
        ([(5, 1)], 1, 5),  # the first token comes with the prompt
        ([(5, 1), (5, 1), (7, 1)], 2, 17),
        ([(50, 101)], 1, 50 + 100 * 11),  # depth 100 on average
        ([(50, 101)] * 4, 4, 4 * 50 + 100 * 11),
        ([(50, 101)] * 4, 2, 4 * 50 + 200 * 11),
        ([(50, 101)], 8, 50 + 100 * 11),  # one text's steps follow each other
    ],
)
def test_sums(prompts: list[tuple[int, int]], num_rows: int, seconds: float) -> None:
    assert estimate_seconds(RoundMachine(), prompts, num_rows) == pytest.approx(seconds, rel=1e-2)


def test_unknown_rates_are_no_estimate() -> None:
    class Unknown(RoundMachine):
        def prefill_seconds(self, num_tokens: int) -> float | None:
            return None

    assert estimate_seconds(Unknown(), [(5, 5)], 1) is None


def test_nothing_to_run_takes_no_time() -> None:
    assert estimate_seconds(RoundMachine(), [], 1) == 0


# Rows in use over the parts of a run, against runs whose rows are known at every moment.


def after(rows_of_steps: list[int], seconds_a_step: float) -> RowsOverTime:
    rows, row_steps = RowsOverTime(), 0
    for number, in_use in enumerate(rows_of_steps, 1):
        row_steps += in_use
        rows.note(number * seconds_a_step, number, row_steps)
    return rows


@pytest.mark.parametrize("num_steps", [10, 1000, 100_000])
def test_each_part_has_its_mean(num_steps: int) -> None:
    tenth = num_steps // 10
    rows_of_steps = [part + 1 for part in range(10) for _ in range(tenth)]
    means = after(rows_of_steps, 0.01).means(10)
    assert means == pytest.approx(list(range(1, 11)), rel=0.02)


def test_a_long_run_keeps_few_samples() -> None:
    rows = after([3] * 100_000, 0.01)
    assert len(rows._seconds) <= 2001


def test_a_run_without_steps() -> None:
    assert RowsOverTime().means(4) == [0, 0, 0, 0]
    assert after([5], 1.0).means(2) == [0, 5]


# A dict on disk does what a dict does.

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
