"""The pages of docs/studies: one for each study, and the index with the articles claim by claim."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from llmcli.cli.kernel_report import finding_text, study_text
from llmcli.lab.study import Study, load_study, study_names
from scripts.studies_doc.articles import article_text, read_articles
from scripts.studies_doc.figure import figure
from scripts.studies_doc.results import FOLDER, Results, read_results

INDEX = """\
# Studies

A study is a ladder of kernels that compute the same thing, the plainest first, one change a rung. On your own card,

    llmcli kernels compare rmsnorm

compiles the rungs, checks each against a float64 reference, and measures them side by side. These pages are written by
`python -m scripts.studies_doc` from `kernels/studies` and from what was measured, in `measured/`.
{cards}

Times are medians of seven rounds in which the rungs take turns, each in a CUDA graph unless it says otherwise, over
copies of the arrays that do not fit into L2 together, as far as 64 copies reach. Less than 3 % of difference counts as
none. GB/s and GFLOP/s count every byte and every operation that the problem needs once, whatever a rung does.

## All studies

| study | what it computes | slowest rung and fastest, at the last of its sizes |
|---|---|---|
"""

ARTICLES = """
## The articles, claim by claim

What the articles behind the studies say, in our words and their order, the command that shows it, and what came out.
What was measured is filled in from `measured/`: *yes* and *no* say whether the rung that is named first was faster. An
article's own numbers are of another card.

"""


def all_pages() -> dict[Path, str]:
    """Every file that the script writes, and its content."""
    files = {}
    with redirect_stdout(io.StringIO()):  # tables are plain where stdout is not a terminal
        for name in study_names():
            study, _ = load_study(name)
            results = read_results(study)
            files[FOLDER / f"{name}.md"] = study_page(study, results)
            if results:
                files[FOLDER / "figures" / f"{name}.svg"] = figure(study, results)
        files[FOLDER / "README.md"] = index_page()
    return files


def study_page(study: Study, results: Sequence[Results]) -> str:
    """The page of a study, with all its results."""
    parts = [
        f"# {study.name}\n\n```text\n{study.title}\n```\n\nSource: {study.source}. {_escaped(study.note)}".rstrip()
    ]
    if results:
        parts.append(f"![Microseconds by rung](figures/{study.name}.svg)")
    rungs = "".join(f"| `{rung.name}` | {_escaped(rung.text)} |\n" for rung in study.rungs)
    parts.append(
        f"## The ladder\n\nThe source is [`{study.name}.cu`](../../kernels/studies/{study.name}.cu).\n\n"
        f"| rung | what it does |\n|---|---|\n{rungs}".rstrip()
    )
    parts += [_card_text(study, one) for one in results] or ["## Measured\n\nThis study was not measured yet."]
    own = [rung for rung in study.rungs if not any(isinstance(call, str) for call in rung.calls)]
    commands = [
        f"llmcli kernels compare {study.name}",
        f"llmcli kernels compare {study.name} --arch sm_86           # registers and occupancy, without a card",
        f"llmcli kernels compare {study.name} --show {own[-1].name} >mine.cu",
        f"llmcli kernels compare {study.name} --try mine.cu          # your own rung, beside these",
    ]
    parts.append("## See it yourself\n\n" + "\n".join(f"    {command}" for command in commands))
    return "\n\n".join(parts) + "\n"


def index_page() -> str:
    """The index, and the articles."""
    rows, cards = [], set()
    for name in study_names():
        study, _ = load_study(name)
        results = read_results(study)
        cards |= {one.card for one in results}
        line = "<br>".join(_summary(study, one) for one in results) or "not measured yet"
        rows.append(f"| [{name}]({name}.md) | {_escaped(study.title)} | {line} |\n")
    told = (
        f"Measured on {' and '.join(sorted(cards))}, and on no other card so far." if cards else "Nothing is measured."
    )
    sections = "\n".join(map(article_text, read_articles()))
    return INDEX.format(cards=told) + "".join(rows) + ARTICLES + sections


def _card_text(study: Study, results: Results) -> str:
    parts = [f"## {results.card} ({results.arch})"]
    if results.missing:
        parts.append(f"Not measured yet on this card: {', '.join(f'`{name}`' for name in results.missing)}.")
    parts.append(f"```text\n{study_text(study, results.measured).rstrip()}\n```")
    sentences = [f"- {_escaped(finding_text(one))}\n" for one in results.findings(study)]
    return "\n\n".join([*parts, *(["".join(sentences).rstrip()] if sentences else [])])


def _summary(study: Study, results: Results) -> str:
    """One line: the ratio between the rungs, and how many claims hold."""
    last = [one for one in results.measured if one.sizes == results.measured[-1].sizes]
    times = {one.rung: one.times.median for one in last if one.times is not None}
    slowest, fastest = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    findings = results.findings(study)
    holding = sum(one.holds for one in findings)
    return (
        f"{results.card.removeprefix('NVIDIA ')}: `{slowest}` {1e6 * times[slowest]:,.2f} us, `{fastest}` "
        f"{1e6 * times[fastest]:,.2f} us, {times[slowest] / times[fastest]:.2f} times as fast; "
        f"{holding} of {len(findings)} claims hold"
    )


def _escaped(text: str) -> str:
    """Words for Markdown: its own signs are escaped, but not in code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[\\|*<]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)
