"""Draws a roofline in plain characters: operations a byte to the right, operations a second upwards, in decades."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 60, 20  # of the whole plot
_LABEL_WIDTH = 8
_COLUMNS, _ROWS = WIDTH - _LABEL_WIDTH - 1, HEIGHT - 2
_WRITTEN_OUT = 3  # decades whose zeros are written; later ones would touch each other
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))

Mark = tuple[str, float, float]  # a character, operations a byte, operations a second


def draw_roofline(marks: Sequence[Mark], read_bytes: float, flops: Mapping[str, float]) -> str:
    """The roofs `/` and `-` with their names, and the marks over them. All numbers are positive.

    Where marks fall together, the first one is seen.
    """
    xs = [x for _, x, _ in marks] + [rate / read_bytes for rate in flops.values()]
    left, right = _decades(min(xs), max(xs))
    # Every roof gets as long as its name.
    longest = 2 + max(map(len, flops))
    while (right - math.log10(max(flops.values()) / read_bytes)) / (right - left) * _COLUMNS < longest:
        right += 1
    ys = [y for _, _, y in marks] + [*flops.values(), read_bytes * 10.0**left]
    bottom, top = _decades(min(ys), max(ys))

    def column(x: float) -> int:
        return round((math.log10(x) - left) / (right - left) * (_COLUMNS - 1))

    def row(y: float) -> int:
        return round((math.log10(y) - bottom) / (top - bottom) * (_ROWS - 1))

    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    highest = max(flops.values())
    for place in range(_COLUMNS):
        rate = read_bytes * 10 ** (left + place / (_COLUMNS - 1) * (right - left))
        if rate <= highest:
            grid[row(rate)][place] = "/"
    for name, rate in sorted(flops.items(), key=lambda one: one[1]):
        line, begin = grid[row(rate)], column(rate / read_bytes)
        line[begin:] = "-" * (_COLUMNS - begin)
        line[-len(name) - 1 :] = f" {name}"
    for character, x, y in reversed(marks):
        grid[row(y)][column(x)] = character
    lines = []
    for number in reversed(range(_ROWS)):
        is_decade = any(row(10.0**decade) == number for decade in range(bottom, top + 1))
        label = _rate(10.0 ** round(bottom + number / (_ROWS - 1) * (top - bottom))) if is_decade else ""
        lines.append(f"{label:>{_LABEL_WIDTH}}|{''.join(grid[number])}")
    lines.append(" " * _LABEL_WIDTH + "+" + "-" * _COLUMNS)
    axis = [" "] * (_LABEL_WIDTH + 1 + _COLUMNS)
    for decade in range(left, right + 1):
        text = f"{10.0**decade:g}" if abs(decade) <= _WRITTEN_OUT else f"1e{decade}"
        begin = min(_LABEL_WIDTH + 1 + column(10.0**decade), len(axis) - len(text))
        axis[begin : begin + len(text)] = text
    lines.append("".join(axis))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _decades(low: float, high: float) -> tuple[int, int]:
    """Whole decades around a range, at least one."""
    first = math.floor(math.log10(low))
    return first, max(math.ceil(math.log10(high)), first + 1)


def _rate(per_second: float) -> str:
    for unit, prefix in _PREFIXES:
        if per_second >= unit:
            return f"{per_second / unit:g}{prefix}"
    return f"{per_second:g}"
