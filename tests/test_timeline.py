"""The timeline of a start: parts never overlap, and with the unaccounted rest they are all of the time."""

from threading import Thread
from types import SimpleNamespace

import pytest

from llmcli.timeline import Timeline


class Clock:
    """A stand-in for the module `time`; a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("llmcli.timeline.time", SimpleNamespace(perf_counter=lambda: self.now))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def taken(timeline: Timeline) -> dict[str, float]:
    return {part.name: round(part.seconds, 6) for part in timeline.parts}


def test_parts_and_what_is_left(clock: Clock) -> None:
    timeline = Timeline(age=2.0)
    timeline.since("imports", 0.0)
    clock.pass_by(1.0)
    with timeline.part("read"):
        clock.pass_by(3.0)
    clock.pass_by(0.5)
    timeline.finish()
    clock.pass_by(10.0)
    assert taken(timeline) == {"imports": 2.0, "read": 3.0}
    assert [part.intervals for part in timeline.parts] == [[(0.0, 2.0)], [(3.0, 6.0)]]
    assert timeline.end == pytest.approx(6.5)
    assert timeline.other_seconds == pytest.approx(1.5)


def test_a_part_inside_another_takes_its_time_away(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.part("outer"):
        clock.pass_by(1.0)
        with timeline.part("inner"):
            clock.pass_by(2.0)
        clock.pass_by(4.0)
    assert taken(timeline) == {"outer": 5.0, "inner": 2.0}
    assert timeline.other_seconds == pytest.approx(0.0)


def test_time_is_given_to_another_part_afterwards(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.part("upload"):
        clock.pass_by(1.0)
        began = timeline.now()
        clock.pass_by(2.0)
        timeline.since("read", began)
        clock.pass_by(4.0)
        timeline.since("read", 0.0)  # no part gets time that is counted already
    assert taken(timeline) == {"upload": 1.0, "read": 6.0}
    assert timeline.other_seconds == pytest.approx(0.0)


def test_an_error_ends_its_part(clock: Clock) -> None:
    timeline = Timeline()

    def fail() -> None:
        clock.pass_by(1.0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), timeline.part("outer"), timeline.part("inner"):
        fail()
    clock.pass_by(5.0)
    timeline.finish()
    assert taken(timeline) == {"inner": 1.0}
    assert timeline.other_seconds == pytest.approx(5.0)


def test_nothing_is_recorded_after_the_end(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.part("open"):
        clock.pass_by(1.0)
        timeline.finish()
        clock.pass_by(1.0)
    with timeline.part("late"), timeline.beside("late too"):
        clock.pass_by(1.0)
    assert taken(timeline) == {"open": 1.0}
    assert timeline.other_seconds == pytest.approx(0.0)


def test_other_threads_count_beside(clock: Clock) -> None:
    timeline = Timeline()

    def work() -> None:
        with timeline.beside("read"):
            clock.pass_by(1.0)

    with timeline.part("read"):
        clock.pass_by(0.5)
        for _ in range(2):
            thread = Thread(target=work)
            thread.start()
            thread.join()
        clock.pass_by(0.5)
    (main, beside) = timeline.parts
    assert (main.seconds, main.is_beside) == (3.0, False)
    assert (beside.seconds, beside.is_beside, beside.begin) == (2.0, True, 0.5)
    assert timeline.other_seconds == pytest.approx(0.0)


def test_threads_at_the_same_time_count_once(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.beside("read"):
        clock.pass_by(1.0)
        with timeline.beside("read"):
            clock.pass_by(1.0)
        clock.pass_by(3.0)
    (part,) = timeline.parts
    assert part.seconds == 5.0
    assert part.begin == 0.0


def test_notes_belong_to_parts_that_are_there(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.part("kernels"):
        clock.pass_by(1.0)
    timeline.note("kernels", "20 files")
    timeline.note("absent", "no matter")
    assert [(part.name, part.note) for part in timeline.parts] == [("kernels", "20 files")]
