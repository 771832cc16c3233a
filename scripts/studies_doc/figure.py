"""Draws the times of a study as bars: SVG by hand, in colours that stand out on white and on black."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from llmcli.lab.compare import Measured
from llmcli.lab.study import Study
from scripts.studies_doc.results import Results

INK = "#6e7781"  # contrast above 4 with white and with GitHub's black
COLORS = ("#3b82d0", "#d9822b", "#2da44e", "#a475f9")  # a card each
CHARACTER = 6.7  # width of one of 11 pixels, in a font of fixed width
LINE, BAR, GAP, MARGIN = 17, 11, 26, 8
PANEL_WIDTH = 430
VALUE_WIDTH = 75


@dataclass(frozen=True)
class Panel:
    """The bars of one choice of sizes: by rung, the microseconds of each card."""

    caption: str
    bars: Mapping[str, Sequence[float | None]]

    @property
    def height(self) -> float:
        """Units: pixels"""
        return LINE + sum(_rung_height(times) for times in self.bars.values())


def figure(study: Study, results: Sequence[Results]) -> str:
    """An SVG: a panel for each choice of sizes, a bar for each rung and card. Every panel has its own scale."""
    panels = [_panel(study, sizes, results) for sizes in study.sizes]
    columns = 1 if len(panels) == 1 else 2
    label_width = CHARACTER * max(len(rung.name) for rung in study.rungs) + MARGIN
    body, top = _legend(results)
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for column, panel in enumerate(row):
            body += _draw(panel, MARGIN + column * (PANEL_WIDTH + GAP), top, label_width)
        top += max(panel.height for panel in row) + GAP
    width = 2 * MARGIN + columns * PANEL_WIDTH + (columns - 1) * GAP
    height = top - GAP + MARGIN
    cards = ", ".join(one.card for one in results)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>{escape(study.name)}: microseconds by rung on {escape(cards)}</title>\n"
        f"<style>text {{ font: 11px ui-monospace, Menlo, Consolas, monospace; fill: {INK} }} "
        f".caption {{ font-weight: bold }} .name, .end {{ text-anchor: end }}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panel(study: Study, sizes: Mapping[str, int], results: Sequence[Results]) -> Panel:
    varying = [name for name in sizes if len({one.get(name) for one in study.sizes}) > 1]
    caption = ", ".join(f"{name} {sizes[name]:,}" for name in varying or sizes)
    bars = {rung.name: [_microseconds(one.measured, rung.name, sizes) for one in results] for rung in study.rungs}
    return Panel(caption, {name: times for name, times in bars.items() if any(times)})


def _microseconds(measured: Sequence[Measured], rung: str, sizes: Mapping[str, int]) -> float | None:
    for one in measured:
        if one.rung == rung and sizes.items() <= one.sizes.items() and one.times is not None:
            return 1e6 * one.times.median
    return None


def _legend(results: Sequence[Results]) -> tuple[list[str], float]:
    """The legend, and where the panels may begin."""
    body, left = [], float(MARGIN)
    for color, one in zip(COLORS, results, strict=False):
        text = f"{one.card}, microseconds"
        body.append(f'<rect x="{left:.0f}" y="{MARGIN}" width="{BAR}" height="{BAR}" fill="{color}"/>')
        body.append(f'<text x="{left + 17:.0f}" y="{MARGIN + 10}">{escape(text)}</text>')
        left += 17 + CHARACTER * len(text) + GAP
    return body, MARGIN + LINE + 8.0


def _rung_height(times: Sequence[float | None]) -> float:
    return LINE + (BAR + 1) * (len(times) - 1)


def _draw(panel: Panel, left: float, top: float, label_width: float) -> list[str]:
    body = [f'<text class="caption" x="{left:.0f}" y="{top + 10:.0f}">{escape(panel.caption)}</text>']
    longest = max(time for times in panel.bars.values() for time in times if time is not None)
    start, room = left + label_width, PANEL_WIDTH - label_width - VALUE_WIDTH
    y = top + LINE
    for name, times in panel.bars.items():
        body.append(f'<text class="name" x="{start - 6:.0f}" y="{y + 10:.0f}">{escape(name)}</text>')
        for number, time in enumerate(times):
            if time is None:
                continue
            bar_top, width = y + number * (BAR + 1), max(1.0, room * time / longest)
            color = COLORS[number % len(COLORS)]
            body.append(f'<rect x="{start:.0f}" y="{bar_top:.0f}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
            body.append(f'<text x="{start + width + 5:.0f}" y="{bar_top + 10:.0f}">{time:,.2f}</text>')
        y += _rung_height(times)
    return body
