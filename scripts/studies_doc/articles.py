"""The articles that the studies follow, claim by claim: docs/studies/articles.toml, filled in from measured data.

A claim states what the article says and how to see it: `compare` has lines `STUDY: RUNG < RUNG at SIZES`, `facts` lines
`STUDY: QUANTITY of RUNG, RUNG at SIZES`, `command` another command; `note` is words without numbers of a card. A
claim that nothing shows has `not_shown`, the reason.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.lab.compare import KernelUse, Measured
from llmcli.lab.study import Claim, Study, load_study, parse_sizes, study_names
from scripts.studies_doc.results import FOLDER, Results, read_results

ARTICLES = FOLDER / "articles.toml"

_COMPARISON = re.compile(r"(?P<study>\w+): (?P<rungs>\w+ < \w+)(?: at (?P<sizes>.+))?")
_FACT = re.compile(r"(?P<study>\w+): (?P<quantity>\w+) of (?P<rungs>\w+(?:, \w+)*)(?: at (?P<sizes>.+))?")


@dataclass(frozen=True)
class Line:
    """A comparison of two rungs, or a quantity of some. `quantity` is empty for a comparison."""

    study: str
    rungs: tuple[str, ...]
    sizes: Mapping[str, int]
    quantity: str = ""


@dataclass(frozen=True)
class ArticleClaim:
    """One thing that an article says. `command` is for what a command other than a study's shows."""

    says: str
    lines: tuple[Line, ...] = ()
    note: str = ""
    command: str = ""
    not_shown: str = ""

    @property
    def studies(self) -> list[str]:
        """The studies that show it, in the order of its lines."""
        return list(dict.fromkeys(line.study for line in self.lines))


@dataclass(frozen=True)
class Article:
    """An article or lesson: its title, author, lesson, and its claims in order."""

    title: str
    by: str
    about: str
    claims: tuple[ArticleClaim, ...]


def read_articles(path: Path = ARTICLES) -> list[Article]:
    """All articles.

    Raises: ValueError for a line of another form, and for a claim with neither a way to see it nor a reason for none
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Article(one["title"], one["by"], one["about"], tuple(map(_claim, one["claims"]))) for one in content["articles"]
    ]


def article_text(article: Article) -> str:
    """An article as a section of a page: a table with a row for each claim.

    Raises: ValueError for rungs or sizes that a study does not have
    """
    rows = "".join(f"| {claim.says} | {_commands(claim)} | {_outcome(claim)} |\n" for claim in article.claims)
    return (
        f"### {article.title}\n\n{article.by}. {article.about}\n\n"
        f"| what it says | what shows it | what came out |\n|---|---|---|\n{rows}"
    )


def _claim(told: Mapping[str, Any]) -> ArticleClaim:
    words = {name: text for name, text in told.items() if name not in ("compare", "facts")}
    lines = [_line(_COMPARISON, text) for text in told.get("compare", ())]
    lines += [_line(_FACT, text) for text in told.get("facts", ())]
    claim = ArticleClaim(lines=tuple(lines), **words)
    if bool(claim.lines or claim.command) == bool(claim.not_shown):
        raise ValueError(f"{claim.says}: say either what shows it, or why nothing does")
    return claim


def _line(form: re.Pattern[str], text: str) -> Line:
    match = form.fullmatch(text)
    parts = match.groupdict() if match else {}
    if match is None or parts.get("quantity", "time") not in _QUANTITIES:
        raise ValueError(
            f"{text}: expected `study: rung < rung at sizes`, or `study: quantity of rung, rung at sizes` with one of "
            f"{', '.join(_QUANTITIES)}"
        )
    sizes = parse_sizes(parts["sizes"], str(ARTICLES))[0] if parts["sizes"] else {}
    return Line(parts["study"], tuple(re.findall(r"\w+", parts["rungs"])), sizes, parts.get("quantity", ""))


def _commands(claim: ArticleClaim) -> str:
    pages = [f"[`llmcli kernels compare {name}`]({name}.md)" for name in claim.studies if name in study_names()]
    return "<br>".join([*pages, *([f"`{claim.command}`"] if claim.command else [])]) or "-"


def _outcome(claim: ArticleClaim) -> str:
    if claim.not_shown:
        return f"Not shown: {claim.not_shown}"
    told = dict.fromkeys(part for line in claim.lines for part in _of_cards(line))
    return "<br>".join([*told, *([claim.note] if claim.note else [])])


def _of_cards(line: Line) -> list[str]:
    if line.study not in study_names():
        return [f"Not shown yet: there is no study {line.study}."]
    study, _ = load_study(line.study)
    unknown = set(line.rungs) - {rung.name for rung in study.rungs}
    if unknown or not any(line.sizes.items() <= sizes.items() for sizes in study.sizes):
        raise ValueError(f"{line}: study {study.name} has no {', '.join(unknown) or 'such sizes'}")
    tell = _fact if line.quantity else _comparison
    told = [
        f"{one.card.removeprefix('NVIDIA ')}: {tell(line, study, one)}"
        for one in read_results(study)
        if not set(line.rungs) & set(one.missing)
    ]
    return told or [f"Not measured yet: {study.name}."]


def _comparison(line: Line, study: Study, results: Results) -> str:
    """Whether one rung is faster than another on a card."""
    faster, slower = line.rungs
    finding = results.finding(study, Claim(faster, slower, line.sizes, ""))
    return (
        f"**{'yes' if finding.holds else 'no'}**, `{faster}` is {finding.ratio:.2f} times as fast as `{slower}` "
        f"({1e6 * finding.faster_seconds:.2f} us, {1e6 * finding.slower_seconds:.2f} us{_at(line)})."
    )


def _fact(line: Line, _: Study, results: Results) -> str:
    """A quantity of several rungs on a card."""
    told = [f"`{rung}` {_QUANTITIES[line.quantity](results.at(rung, line.sizes))}" for rung in line.rungs]
    return f"{line.quantity} of {', '.join(told)}{_at(line)}."


def _at(line: Line) -> str:
    sizes = ", ".join(f"{name} {number:,}" for name, number in line.sizes.items())
    return f" at {sizes}" if sizes else ""


def _each(tell: Callable[[KernelUse], object]) -> Callable[[Measured], str]:
    """The quantity of every kernel of a rung."""
    return lambda one: " and ".join(str(tell(use)) for use in one.uses)


def _seconds(one: Measured) -> float:
    if one.times is None:
        raise ValueError(f"{one.rung} has no time")
    return one.times.median


_QUANTITIES: Mapping[str, Callable[[Measured], str]] = {
    "time": lambda one: f"{1e6 * _seconds(one):.2f} us",
    "bandwidth": lambda one: f"{one.num_bytes / _seconds(one) / 1e9:,.1f} GB/s",
    "arithmetic": lambda one: f"{one.num_operations / _seconds(one) / 1e9:,.0f} GFLOP/s",
    "registers": _each(lambda use: use.resources.registers),
    "spills": _each(lambda use: f"{use.spill_bytes} bytes"),
    "occupancy": _each(lambda use: f"{use.occupancy.share:.0%}"),
}
