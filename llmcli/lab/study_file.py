"""Reads a study: a `.cu` file whose comments say what it computes, which kernels are its rungs, and what they show.

The format is described in kernels/studies/README.md. A reader's own kernel has the form of one rung.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcli.errors import UsageError

_FIELD = re.compile(r"(Shapes|Problem|Sizes|Check|Claim|Note): *(.*)")
_RUNG = re.compile(r"rung ([a-z][a-z0-9_]*): *(.*)")
_LAUNCH = re.compile(r"launch: *(.*)")
_START = re.compile(r"start: *stream")
_CHEVRONS = re.compile(r"(.+?)<<<(.+)>>>(?: (\d+) times)?( overlapping)?")
_TITLE = re.compile(r"(?:studies/)?([\w-]+): (.+?)(?: {2,}Source: (.+))?$")
_CLAIM = re.compile(r"(\w+) < (\w+)(?: at ([^:]+))?: (.+)")


@dataclass(frozen=True)
class KernelCall:
    """One launch as CUDA writes it, `name<<<grid, block, shared>>>`: the numbers are expressions over the sizes.

    With `overlaps` it may start before the one in front ends, on cards that can.
    """

    name: str
    grid: tuple[str, ...]
    block: tuple[str, ...]
    shared_bytes: str = "0"
    overlaps: bool = False


@dataclass(frozen=True)
class Rung:
    """One way to solve the problem: launches in turn, or the name of a solver (`llmcli`, `cublas`).

    `by_stream`: the host starts every launch by itself when it is timed; else a CUDA graph holds them.
    """

    name: str
    text: str
    calls: tuple[KernelCall | str, ...]
    line: int
    by_stream: bool = False


@dataclass(frozen=True)
class Claim:
    """`faster` takes less time than `slower`, at these sizes, for this reason; it may be false on a card."""

    faster: str
    slower: str
    sizes: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class Study:
    """A study as its file tells it. `sizes` are those to measure, `check_sizes` those to check results with."""

    name: str
    title: str
    source: str
    problem: str
    sizes: tuple[Mapping[str, int], ...]
    check_sizes: tuple[Mapping[str, int], ...]
    rungs: tuple[Rung, ...]
    claims: tuple[Claim, ...]
    note: str


def parse_study(text: str, path: str) -> Study:
    """Read a study's file.

    Raises: UsageError naming file and line
    """
    head, body = _split_head(text)
    first, fields = _fields(head, path)
    title = _TITLE.fullmatch(first)
    if title is None or "Problem" not in fields or "Sizes" not in fields:
        raise UsageError(f"{path}: a study begins with `// NAME: what it computes`, Problem: and Sizes:")
    rungs = tuple(_rungs(body, len(head) + 1, path))
    names = [rung.name for rung in rungs]
    if not rungs or len(set(names)) != len(names):
        raise UsageError(f"{path}: a study has one `// rung NAME: text` or more, each of its own name")
    claims = tuple(_claim(one, names, path) for one in fields.get("Claim", ()))
    sizes = tuple(combination for line in fields["Sizes"] for combination in parse_sizes(line, path))
    check = tuple(combination for line in fields.get("Check", ()) for combination in parse_sizes(line, path))
    return Study(
        title[1],
        title[2],
        title[3] or "",
        fields["Problem"][0],
        sizes,
        check or sizes,
        rungs,
        claims,
        " ".join(fields.get("Note", ())),
    )


def parse_rung(text: str, path: str) -> Rung:
    """Read a reader's own file: one `// rung NAME: text` with its `// launch:` lines.

    Raises: UsageError naming file and line
    """
    rungs = tuple(_rungs(text.splitlines(), 1, path))
    if len(rungs) != 1:
        raise UsageError(
            f"{path} has {len(rungs)} rungs, expected one: a comment `// rung NAME: what it does`, and under it "
            "`// launch: kernel<<<grid, block>>>`"
        )
    return rungs[0]


def parse_sizes(line: str, path: str) -> list[dict[str, int]]:
    """All combinations of `num_rows 1; num_columns 512, 1024`.

    Raises: UsageError
    """
    axes = []
    for part in line.split(";"):
        name, _, numbers = part.strip().partition(" ")
        values = [number.strip().replace("_", "") for number in numbers.split(",")]
        if not name.isidentifier() or not all(value.isdigit() for value in values):
            raise UsageError(f"{path}: sizes are `name number, number; name number`, not {part.strip()!r}")
        axes.append([(name, int(value)) for value in values])
    return [dict(combination) for combination in itertools.product(*axes)]


def _split_head(text: str) -> tuple[list[str], list[str]]:
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return [line.removeprefix("//").strip() for line in lines[:end]], lines[end:]


def _fields(head: Sequence[str], path: str) -> tuple[str, dict[str, list[str]]]:
    """The first sentence, and the values of each field; a line that begins none continues the one before."""
    first: list[str] = []
    fields: dict[str, list[str]] = {}
    last: list[str] = first
    for line in head:
        if match := _FIELD.fullmatch(line):
            last = fields.setdefault(match[1], [])
            last.append(match[2])
        elif last is first or not last:
            first.append(line)
        else:
            last[-1] += f" {line}"
    if not first:
        raise UsageError(f"{path}: the first line is a comment `// NAME: what it computes`")
    # Two blanks part the title from its source, so only line ends become one blank.
    return " ".join(first), fields


def _rungs(lines: Sequence[str], first_line: int, path: str) -> list[Rung]:
    rungs = []
    number = 0
    while number < len(lines):
        comment = []
        start = number
        while number < len(lines) and lines[number].startswith("//"):
            comment.append(lines[number].removeprefix("//").strip())
            number += 1
        if comment and (match := _RUNG.fullmatch(comment[0])):
            rungs.append(_rung(match[1], match[2], comment[1:], first_line + start, path))
        number += not comment
    return rungs


def _rung(name: str, first: str, comment: Sequence[str], line: int, path: str) -> Rung:
    text, by_stream = [first], False
    calls: list[KernelCall | str] = []
    for part in comment:
        if match := _LAUNCH.fullmatch(part):
            calls += _calls(match[1], f"{path}:{line}")
        elif _START.fullmatch(part):
            by_stream = True
        else:
            text.append(part)
    if not calls:
        raise UsageError(f"{path}:{line}: rung {name} has no `// launch: kernel<<<grid, block>>>`")
    return Rung(name, " ".join(" ".join(text).split()), tuple(calls), line, by_stream)


def _calls(text: str, place: str) -> list[KernelCall | str]:
    if text.isidentifier():
        return [text]
    match = _CHEVRONS.fullmatch(text)
    parts = _split_commas(match[2]) if match else []
    if match is None or not 2 <= len(parts) <= 3:
        raise UsageError(f"{place}: a launch is `kernel<<<grid, block>>>` or `kernel<<<grid, block, bytes>>>`")
    shared_bytes = parts[2] if len(parts) == 3 else "0"
    call = KernelCall(match[1].strip(), _dimensions(parts[0]), _dimensions(parts[1]), shared_bytes, bool(match[4]))
    return [call] * int(match[3] or 1)


def _dimensions(text: str) -> tuple[str, ...]:
    """`dim3(a, b)` is two dimensions, anything else one."""
    inner = re.fullmatch(r"dim3\((.*)\)", text)
    return tuple(_split_commas(inner[1])) if inner else (text,)


def _split_commas(text: str) -> list[str]:
    """Parts between commas that stand in no parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _claim(text: str, names: Sequence[str], path: str) -> Claim:
    match = _CLAIM.fullmatch(text)
    if match is None or match[1] not in names or match[2] not in names:
        raise UsageError(f"{path}: a claim is `rung < rung: reason` or `rung < rung at size number: reason`: {text}")
    sizes = parse_sizes(match[3], path)[0] if match[3] else {}
    return Claim(match[1], match[2], sizes, match[4])
