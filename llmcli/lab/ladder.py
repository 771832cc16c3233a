"""Binds a study's rungs to a problem: every launch gets its sizes and its arguments. Needs no card."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmcli.errors import UsageError
from llmcli.kernels.sources import flatten_text, kernels_folder
from llmcli.lab.expressions import evaluate
from llmcli.lab.problem import Arrays, Problem
from llmcli.lab.signatures import Parameter, kernel_parameters
from llmcli.lab.study_file import KernelCall, Rung, Study, parse_rung, parse_study
from llmcli.reading import CUDA_SOURCE

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
    """The studies that there are."""
    return sorted(path.stem for path in _folder().glob("*.cu"))


def find_studies(name: str) -> list[str]:
    """The study of this name, whose words may be joined by `-`; else those whose names begin with its words.

    So `decode` is decode_attention, decode_cache and decode_mlp.
    Raises: UsageError
    """
    name, known = name.replace("-", "_"), study_names()
    found = [name] if name in known else [one for one in known if one.startswith(f"{name}_")]
    if not found:
        raise UsageError(f"there is no study {name!r}; run llmcli kernels compare to see them")
    return found


def load_study(name: str) -> tuple[Study, Source]:
    """A study, of which `find_studies` gave the name, and its source.

    Raises: UsageError for a file of another form
    """
    path = _folder() / f"{name}.cu"
    text = path.read_text(encoding="ascii")
    return parse_study(text, f"kernels/studies/{name}.cu"), Source(f"{_FOLDER}/{name}", text)


def find_rung(study: Study, name: str) -> Rung:
    """The rung of that name.

    Raises: UsageError
    """
    for rung in study.rungs:
        if rung.name == name:
            return rung
    raise UsageError(f"study {study.name} has no rung {name!r}; it has {', '.join(one.name for one in study.rungs)}")


def read_rung(path: Path) -> tuple[Rung, Source]:
    """A reader's own file with one rung.

    Raises: UsageError
    """
    text = CUDA_SOURCE.read_text(path)
    return parse_rung(text, str(path)), Source(f"{_FOLDER}/{_UNSAFE.sub('_', path.stem)}", text, path)


def own_sources(sources: Iterable[Source]) -> dict[str, str]:
    """Those sources that do not lie among the kernels, flattened, for a device to compile.

    Raises: UsageError for an included file that is missing
    """
    try:
        return {one.stem: flatten_text(one.text, _UNSAFE.sub("_", one.path.name)) for one in sources if one.path}
    except ValueError as error:
        raise UsageError(str(error)) from error


def kernel_names(rung: Rung) -> list[str]:
    """The name expressions that a rung launches, as a compiler wants them."""
    return list(dict.fromkeys(call.name for call in rung.calls if isinstance(call, KernelCall)))


def solve(device: Any, rung: Rung, source: Source, problem: Problem, arrays: Arrays) -> None:
    """Start all launches of a rung.

    Raises: UsageError for names, types and sizes that do not fit; DeviceError
    """
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
