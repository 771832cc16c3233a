"""Draws the loss curve of a training as a small SVG."""

from __future__ import annotations

import csv
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 720, 360, 48


def _column(rows: list[dict[str, str]], name: str) -> list[tuple[float, float]]:
    """The points of one column that is not filled in every row."""
    return [(float(row["tokens"]), float(row[name])) for row in rows if row[name]]


def write_curve(table: Path, picture: Path) -> None:
    """Read `loss.csv` and draw training and held-out loss against tokens seen."""
    with table.open() as file:
        rows = list(csv.DictReader(file))
    series = {
        "training": ("#4477aa", _column(rows, "loss")),
        "held out": ("#cc6677", _column(rows, "held_out_loss")),
    }
    points = [point for _, line in series.values() for point in line]
    if not points:
        return
    right = max(x for x, _ in points)
    # The first steps fall from ln(4096); cut there, or the rest is a flat line.
    low, high = min(y for _, y in points), min(4.0, max(y for _, y in points))

    def place(x: float, y: float) -> str:
        across = _MARGIN + (_WIDTH - 2 * _MARGIN) * x / max(right, 1.0)
        share = (min(y, high) - low) / max(high - low, 1e-9)
        return f"{across:.1f},{_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for index, (name, (colour, line)) in enumerate(series.items()):
        path = " ".join(place(*point) for point in line)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        parts.append(f'<text x="{_WIDTH - 150}" y="{30 + 16 * index}" fill="{colour}">{name}</text>')
    for value in (low, (low + high) / 2, high):
        parts.append(f'<text x="6" y="{place(0, value).split(",")[1]}">{value:.2f}</text>')
    parts.append(
        f'<text x="{_MARGIN}" y="{_HEIGHT - 14}">loss against tokens seen, 0 to {right / 1e6:,.0f} million</text></svg>'
    )
    picture.write_text("\n".join(parts))
