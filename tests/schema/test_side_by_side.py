"""Calls that threads share: each once, side by side, and none goes on behind a Ctrl-C."""

import threading
import time
from collections.abc import Iterator

import pytest

from llmcli.schema import side_by_side
from llmcli.schema.side_by_side import MAX_HELPERS, run_side_by_side


@pytest.fixture(params=[1, 3, 16])
def num_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A machine of so many cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(request.param), raising=False)
    side_by_side._helpers.cache_clear()
    yield request.param
    side_by_side._helpers.cache_clear()


def test_each_is_called_once(num_cores: int) -> None:
    for count in (0, 1, 2, 8, 100):
        called: list[int] = []
        run_side_by_side([(called.append, (number,)) for number in range(count)])
        assert sorted(called) == list(range(count))


def test_as_many_at_once_as_there_are_cores(num_cores: int) -> None:
    together = min(num_cores, MAX_HELPERS + 1)
    barrier = threading.Barrier(together)
    for _ in range(20):
        run_side_by_side([(barrier.wait, (10,))] * together)
    names = {thread.name for thread in threading.enumerate()}
    assert ("masks" in names) or together == 1


def test_a_ctrl_c_waits_for_what_has_begun_and_leaves_out_the_rest(num_cores: int) -> None:
    main, begun, ended = threading.get_ident(), list[int](), list[int]()
    others = threading.Semaphore(0)

    def work(number: int) -> None:
        begun.append(number)
        if threading.get_ident() == main:
            for _ in range(min(num_cores - 1, MAX_HELPERS)):
                assert others.acquire(timeout=10)
            raise KeyboardInterrupt
        others.release()
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([(work, (number,)) for number in range(50)])
    count = len(begun)
    assert count < 50
    assert len(ended) == count - 1  # all but the one that was interrupted
    time.sleep(0.02)
    assert len(begun) == count
