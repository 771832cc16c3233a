"""Studies: reads a `.cu` file, binds its rungs to a problem, and cuts them out to be shown. Needs no card."""

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmcli.errors import UsageError
from llmcli.kernels.sources import flatten_text, kernels_folder
from llmcli.lab.problem import Arrays, Problem
from llmcli.reading import CUDA_SOURCE

# Reads a study: a `.cu` file whose comments say what it computes, which kernels are its rungs, and what they show.
#
# kernels/studies/README.md describes the format. A reader's own kernel has the form of one rung.

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

    With `overlaps` it may start before the previous one ends, on cards that can.
    """

    name: str
    grid: tuple[str, ...]
    block: tuple[str, ...]
    shared_bytes: str = "0"
    overlaps: bool = False


@dataclass(frozen=True)
class Rung:
    """One way to solve the problem: launches in turn, or the name of a solver (`llmcli`, `cublas`).

    `by_stream`: the host starts every launch when it is timed; otherwise a CUDA graph holds them.
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
    """A study as its file describes it. `sizes` are those to measure, `check_sizes` those to check results with."""

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
    """Read a study's file. Raises: UsageError naming file and line"""
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
    """All combinations of `num_rows 1; num_columns 512, 1024`. Raises: UsageError"""
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
    head = _comment(lines)
    return [line.removeprefix("//").strip() for line in head], lines[len(head) :]


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
    # Two blanks separate the title from its source, so only line ends become one blank.
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
    """Split at commas outside parentheses."""
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


# Sizes of a launch as CUDA programs write them: whole numbers, names, + - * / %, parentheses. Nothing else is run.

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # as between C's whole numbers
    ast.Mod: operator.mod,
}
_MAX_LENGTH = 200


def evaluate(text: str, names: Mapping[str, int]) -> int:
    """The value of an expression over these names. Raises: UsageError"""
    try:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"longer than {_MAX_LENGTH} characters")
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{text!r} cannot be worked out: {problem}; sizes here are {', '.join(names)}") from error


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names)))
    raise ValueError(f"{ast.unparse(node)!r} is neither a number, a known size nor + - * / %")


# The parameters of a source's kernels, so that arguments are found by name.

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"__global__[^;{]*?(\w+)\s*\(([^(){};]*)\)\s*\{")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)|ROW_LAUNCH_BOUNDS\s*\([^()]*\)")
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__|__restrict|__grid_constant__)\b")
_SCALARS: dict[str, Any] = {
    "int": np.int32,
    "int32_t": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "uint32_t": np.uint32,
    "long long": np.int64,
    "int64_t": np.int64,
    "size_t": np.uint64,
    "uint64_t": np.uint64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
# Elements that a pointer of this type may read; other types (float4, a template's T) may read any.
_ELEMENTS = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "__half": "float16",
    "__nv_bfloat16": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "int8_t": "int8",
    "signed char": "int8",
    "uint8_t": "uint8",
    "unsigned char": "uint8",
}


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: the C type without qualifiers, and whether it is a pointer."""

    name: str
    type: str
    is_pointer: bool

    def argument(self, values: Mapping[str, Any], kernel: str) -> Any:
        """The value of this name, in the form that the kernel takes.

        Raises: UsageError if there is none, or if it has another type
        """
        if self.name not in values:
            raise UsageError(f"kernel {kernel} asks for {self.name!r}; here are {', '.join(sorted(values))}")
        value = values[self.name]
        is_array = hasattr(value, "data") and hasattr(value, "strides") and bool(value.shape)
        if is_array != self.is_pointer:
            kind = "an array" if is_array else "a number"
            raise UsageError(f"kernel {kernel}: {self.name} is {kind}, the parameter is `{self.declared}`")
        if is_array:
            wanted = _ELEMENTS.get(self.type)
            if wanted is not None and value.dtype != np.dtype(wanted):
                raise UsageError(f"kernel {kernel}: {self.name} is {value.dtype}, the parameter is `{self.declared}`")
            return value
        if self.type not in _SCALARS:
            raise UsageError(f"kernel {kernel}: `{self.declared}` is not a number that a launch can pass")
        return _SCALARS[self.type](value)

    def takes_as(self, other: "Parameter") -> bool:
        """Whether it takes the other's argument: the same name, both addresses or both numbers of one type.

        What an address points to is not compared.
        """
        types = [_SCALARS.get(one.type, one.type) for one in (self, other)]
        is_alike = self.name == other.name and self.is_pointer == other.is_pointer
        return is_alike and (self.is_pointer or types[0] == types[1])

    @property
    def declared(self) -> str:
        """As in the source, without qualifiers."""
        return f"{self.type}{'*' if self.is_pointer else ''} {self.name}"


def kernel_parameters(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of every kernel that a source defines, by the kernel's name."""
    text = _LAUNCH_BOUNDS.sub("", _COMMENT.sub("", source))
    return {
        match[1]: tuple(_parameter(part) for part in match[2].split(",") if part.strip())
        for match in _KERNEL.finditer(text)
    }


def _parameter(text: str) -> Parameter:
    words = " ".join(_QUALIFIERS.sub(" ", text).replace("*", " * ").split())
    kind, _, name = words.rpartition(" ")
    return Parameter(name, kind.replace("*", "").strip(), "*" in kind)


# Binds a study's rungs to a problem: every launch gets its sizes and its arguments. Needs no card.

_FOLDER = "studies"
_UNSAFE = re.compile(r"[^\w.-]")  # in names that compilers repeat


@dataclass(frozen=True)
class Source:
    """The text of a `.cu` file and the stem under which a device compiles it; `path` is that of a reader's file."""

    stem: str
    text: str
    path: Path | None = None

    @cached_property
    def parameters(self) -> Mapping[str, tuple[Parameter, ...]]:
        """The parameters of its kernels."""
        return kernel_parameters(self.text)


def study_names() -> list[str]:
    """The names of all studies."""
    return sorted(path.stem for path in _folder().glob("*.cu"))


def find_studies(name: str) -> list[str]:
    """The study of this name, whose words may be joined by `-`; else those whose names begin with its words.

    So `decode` means decode_attention, decode_cache and decode_mlp.
    Raises: UsageError
    """
    name, known = name.replace("-", "_"), study_names()
    found = [name] if name in known else [one for one in known if one.startswith(f"{name}_")]
    if not found:
        raise UsageError(f"there is no study {name!r}; run llmcli kernels compare to see them")
    return found


def load_study(name: str) -> tuple[Study, Source]:
    """Load a study by a name from `find_studies`, and its source. Raises: UsageError for a file of another form"""
    path = _folder() / f"{name}.cu"
    text = path.read_text(encoding="ascii")
    return parse_study(text, f"kernels/studies/{name}.cu"), Source(f"{_FOLDER}/{name}", text)


def find_rung(study: Study, name: str) -> Rung:
    """The rung of that name. Raises: UsageError"""
    for rung in study.rungs:
        if rung.name == name:
            return rung
    raise UsageError(f"study {study.name} has no rung {name!r}; it has {', '.join(one.name for one in study.rungs)}")


def read_rung(path: Path) -> tuple[Rung, Source]:
    """A reader's own file with one rung. Raises: UsageError"""
    text = CUDA_SOURCE.read_text(path)
    return parse_rung(text, str(path)), Source(f"{_FOLDER}/{_UNSAFE.sub('_', path.stem)}", text, path)


def own_sources(sources: Iterable[Source]) -> dict[str, str]:
    """The sources that are not among the kernels, flattened, for a device to compile.

    Raises: UsageError for an included file that is missing
    """
    try:
        return {one.stem: flatten_text(one.text, _UNSAFE.sub("_", one.path.name)) for one in sources if one.path}
    except ValueError as error:
        raise UsageError(str(error)) from error


def kernel_names(rung: Rung) -> list[str]:
    """The name expressions that a rung launches, in the compiler's form."""
    return list(dict.fromkeys(call.name for call in rung.calls if isinstance(call, KernelCall)))


def solve(device: Any, rung: Rung, source: Source, problem: Problem, arrays: Arrays) -> None:
    """Start all launches of a rung. Raises: UsageError for names, types and sizes that do not fit; DeviceError"""
    for call in rung.calls:
        if isinstance(call, KernelCall):
            _launch(device, call, source, problem, arrays)
        else:
            _solver(problem, call)(device, arrays)


def _launch(device: Any, call: KernelCall, source: Source, problem: Problem, arrays: Arrays) -> None:
    function = call.name.partition("<")[0]
    if function not in source.parameters:
        raise UsageError(f"{source.stem}.cu defines no kernel {function!r}; it has {', '.join(source.parameters)}")
    values = {**problem.sizes, **problem.scalars, **arrays}
    device.launch(
        source.stem,
        call.name,
        grid=tuple(evaluate(size, problem.sizes) for size in call.grid),
        block=tuple(evaluate(size, problem.sizes) for size in call.block),
        arguments=tuple(parameter.argument(values, function) for parameter in source.parameters[function]),
        shared_bytes=evaluate(call.shared_bytes, problem.sizes),
        overlaps=call.overlaps,
    )


def _solver(problem: Problem, name: str) -> Callable[[Any, Arrays], None]:
    if name not in problem.solvers:
        known = ", ".join(problem.solvers) or "none"
        raise UsageError(f"problem {problem.name} has no solver {name!r}; it has {known}")
    return problem.solvers[name]


def _folder() -> Path:
    return kernels_folder() / _FOLDER


# Cuts out of a source the parts of one rung: its comment, its kernels, and the functions that these call.
#
# The result is a file for `--try`, for a reader to start from.

_CODE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*')  # braces in strings and comments do not count
_INNERMOST_BODY = re.compile(r"\{[^{}]*\}")


def excerpt(rung: Rung, source: Source) -> str:
    """The part of a source that a rung needs, in its order, without other rungs."""
    blocks = _blocks(source.text)
    wanted = {name.partition("<")[0] for name in kernel_names(rung)}
    chosen = {index for index, block in enumerate(blocks) if "#include" in block}
    while True:
        used = {index for index, block in enumerate(blocks) if wanted & _defined(block)} - chosen
        if not used:
            break
        chosen |= used
        for index in used:
            wanted |= set(re.findall(r"\w+", _CODE.sub("", blocks[index])))
    comment = "\n".join(_comment(source.text.splitlines()[rung.line - 1 :]))
    parts = [_without_rungs(blocks[index]) for index in sorted(chosen)]
    return "\n\n".join([comment, *parts]) + "\n"


def _blocks(text: str) -> list[str]:
    """Split at blank lines outside braces."""
    blocks: list[list[str]] = [[]]
    depth = 0
    for line in text.splitlines():
        code = _CODE.sub("", line)
        depth += code.count("{") - code.count("}")
        if line.strip() or depth > 0:
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


def _defined(block: str) -> set[str]:
    """The names that a block defines at its top level: functions, structures, constants, macros."""
    head, bodies = _LAUNCH_BOUNDS.sub("", _CODE.sub("", block)), 1
    while bodies:
        head, bodies = _INNERMOST_BODY.subn("", head)
    names = set(re.findall(r"(\w+)\s*\(", head))
    names |= set(re.findall(r"(?:struct|class|enum|#define|using)\s+(\w+)", head))
    return names | set(re.findall(r"constexpr\s+\w+\s+(\w+)", head)) | set(re.findall(r",\s*(\w+)\s*=", head))


def _comment(lines: list[str]) -> list[str]:
    return list(itertools.takewhile(lambda line: line.startswith("//"), lines))


def _without_rungs(block: str) -> str:
    """A block without a rung's comment at its start, which may be another rung's."""
    lines = block.splitlines()
    comment = _comment(lines)
    return "\n".join(lines[len(comment) :] if comment and comment[0].startswith("// rung ") else lines)
