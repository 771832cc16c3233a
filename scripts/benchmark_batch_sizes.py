"""Speed on a card by batch size and by prompt length: every figure by `llmcli bench`, beside the least that it allows.

    python -m scripts.benchmark_batch_sizes measure MODEL --out FILE.json [-- OPTION OF BENCH ...]
    python -m scripts.benchmark_batch_sizes draw FILE.json [--peer NAME ROWS=TOKENS_PER_SECOND ...]

`measure` runs `llmcli bench MODEL` in a process of its own for each number of rows, and once for the prompts. MODEL is
a folder: the weights of a shape would be written anew for each process. `draw` prints the tables and writes FILE.svg,
with what another program made on the same card and file.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTH, NEW_TOKENS = 128, 64
PROMPTS = (8, 12, 64, 128, 256, 512, 1024, 2048, 4000, 8000, 16000)
FLOOR, OURS, PEER = "#6e7781", "#3b82d0", "#d9822b"
HEADER = ("tokens/s", "of floor", "plan")

Figures = Mapping[str, Any]  # an element of `prompts` or `decode` of `llmcli bench --json`
Reports = Mapping[str, Sequence[Any]]  # what `measure` returns


def bench(model: str, *options: object) -> Any:
    """One report of `llmcli bench`. Raises: subprocess.CalledProcessError"""
    command = [sys.executable, "-m", "llmcli", "bench", model, "--json", "--quiet", *map(str, options)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(model: str, rows: Sequence[int], prompts: Sequence[int], options: Sequence[str]) -> Reports:
    """The reports of all sizes. Raises: as `bench`"""
    decoding = ("--prompt", DEPTH, "--tokens", NEW_TOKENS, *options)
    lengths = [word for length in prompts for word in ("--prompt", length)]
    return {
        "rows": [bench(model, "--rows", count, *decoding) for count in rows],
        "prompts": [bench(model, *lengths, "--depth", DEPTH, *options)],
    }


def by_rows(reports: Iterable[Any]) -> dict[int, Figures]:
    """The figures of decoding by number of rows."""
    return {figures["num_rows"]: figures for report in reports for figures in report["decode"]}


def by_length(reports: Iterable[Any]) -> dict[int, Figures]:
    """The figures of prompts by number of tokens."""
    return {figures["num_tokens"]: figures for report in reports for figures in report["prompts"]}


def tables(reports: Reports, peer: str | None, theirs: Mapping[int, float]) -> str:
    """Markdown: decoding by rows, and prompts by length. `theirs` are tokens/s of the peer by rows.

    `plan` is the error of its prediction: +10% promises too much.
    """
    header = ["rows", *HEADER, *([peer] if peer else [])]
    lines = [
        [f"{count}", *_cells(figures), *([f"{theirs[count]:,.0f}" if count in theirs else ""] if peer else [])]
        for count, figures in by_rows(reports["rows"]).items()
    ]
    prompts = [[f"{count:,}", *_cells(figures)] for count, figures in by_length(reports["prompts"]).items()]
    return f"{_markdown(header, lines)}\n{_markdown(['prompt', *HEADER], prompts)}"


def _cells(figures: Figures) -> list[str]:
    error = figures["predicted_tokens_per_second"] / figures["tokens_per_second"] - 1
    share = figures["floor_share"]  # None for prompts on the CPU
    return [f"{figures['tokens_per_second']:,.0f}", "-" if share is None else f"{share:.0%}", f"{error:+.0%}"]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(path: Path, reports: Reports, peer: str | None, theirs: Mapping[int, float]) -> None:
    """Write the picture of both, as SVG. Needs matplotlib, which the extra `plot` brings."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    rcParams["svg.hashsalt"] = path.stem  # the same figures give the same file
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    of_rows, of_prompts = figure.subplots(1, 2)
    ours, prompts = by_rows(reports["rows"]), by_length(reports["prompts"])
    for axes, figures in ((of_rows, ours), (of_prompts, prompts)):
        known = {size: one for size, one in figures.items() if one["floor_share"] is not None}
        floor = {size: one["tokens_per_second"] / one["floor_share"] for size, one in known.items()}
        _plot(axes, floor, "what the card allows", color=FLOOR, linestyle="--")
        _plot(axes, _rates(figures), "llmcli", color=OURS, marker="o")
    if peer:
        _plot(of_rows, theirs, peer, color=PEER, marker="o")
    of_rows.set(xlabel="rows", ylabel="new tokens/s of all rows")
    of_prompts.set(xlabel="tokens of a prompt", ylabel="tokens/s")
    for axes, sizes in ((of_rows, ours), (of_prompts, prompts)):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(list(sizes), labels=[f"{size:,}" for size in sizes], rotation=45)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    (report,) = reports["prompts"]
    figure.suptitle(f"{report['model']}, {report['precision']}, {report['device']}")
    figure.savefig(path, format="svg", metadata={"Date": None})


def _rates(figures: Mapping[int, Figures]) -> dict[int, float]:
    return {size: one["tokens_per_second"] for size, one in figures.items()}


def _plot(axes: Any, rates: Mapping[int, float], label: str, **style: str) -> None:
    axes.plot(list(rates), list(rates.values()), label=label, markersize=4, **style)


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_measure = verbs.add_parser("measure")
    of_measure.add_argument("model")
    of_measure.add_argument("--out", type=Path, required=True)
    of_measure.add_argument("--rows", type=int, nargs="+", default=ROWS)
    of_measure.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    of_draw = verbs.add_parser("draw")
    of_draw.add_argument("file", type=Path)
    of_draw.add_argument("--peer", nargs="+", default=[])
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    if options.verb == "measure":
        measured = measure(options.model, options.rows, options.prompts, words[end + 1 :])
        options.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        return
    reports = json.loads(options.file.read_text(encoding="utf-8"))
    peer, *rates = options.peer or [None]
    theirs = {int(rows): float(rate) for rows, _, rate in (one.partition("=") for one in rates)}
    print(tables(reports, peer, theirs))
    draw(options.file.with_suffix(".svg"), reports, peer, theirs)


if __name__ == "__main__":
    main()
