"""Rows in use over the parts of a run, against runs whose rows are known at every moment."""

import pytest

from llmcli.batch.run import RowsOverTime


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
