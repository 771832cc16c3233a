"""Draws a roofline as a picture. Needs matplotlib, which is an extra; `lazy.py` imports this module when it is used."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from llmcli.cli.kernel_report import Mark
from llmcli.writing import OutputFile

PICTURE = OutputFile("a picture", lambda head: True, "name another file")


def save_figure(
    path: Path, title: str, marks: Sequence[Mark], labels: Sequence[str], read_bytes: float, flops: Mapping[str, float]
) -> None:
    """Write the roofline as .png or .svg, by the path's ending; `labels` say what the marks are.

    Raises: UsageError, OutputError
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    highest = max(flops.values())
    left = min(x for _, x, _ in marks) / 2
    right = 4 * highest / read_bytes
    axes.plot([left, highest / read_bytes], [read_bytes * left, highest], color="black")
    axes.annotate(
        f"{read_bytes / 1e9:,.0f} GB/s", (left, read_bytes * left), xytext=(4, 12), textcoords="offset points"
    )
    for name, rate in flops.items():
        axes.plot([rate / read_bytes, right], [rate, rate], color="black")
        axes.annotate(f"{name}: {rate / 1e12:,.0f} trillion a second", (right, rate), ha="right", va="bottom")
    for (character, x, y), label in zip(marks, labels, strict=True):
        axes.scatter([x], [y], s=70, label=f"{character}: {label}")
        axes.annotate(character, (x, y), xytext=(5, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second", title=title)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".").lower())
    PICTURE.write(path, picture.getvalue(), replace=False)
