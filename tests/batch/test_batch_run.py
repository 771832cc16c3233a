"""The loop over a scheduler, and a whole run with its file: killed at every byte, interrupted, failing, in order."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch.fake_scheduler import FakeScheduler, length_of, text_of

from llmcli.batch.output import InOrder, Journal, Written, read_output
from llmcli.batch.run import Progress, run_batch
from llmcli.engine.events import Failed, Finished
from llmcli.engine.request import Request
from llmcli.errors import DeviceError, UsageError
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
