"""The rooms and who may import whom; no cycles, no oversized file. docs/architecture.md says what each room owns."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from llmcli.cli import lazy

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600

# A room is the longest name here that a module's name begins with. Every room may import itself and those of `COMMON`,
# which import nothing but errors.
ROOMS: dict[str, set[str]] = {
    "llmcli": set(),
    "llmcli.__main__": {"llmcli.cli"},
    "llmcli.api": {"llmcli.cli", "llmcli.batch", "llmcli.engine", "llmcli.tokenizer"},
    "llmcli.errors": set(),
    "llmcli.reading": set(),
    "llmcli.writing": set(),
    "llmcli.destination_lock": set(),
    "llmcli.patterns": set(),
    "llmcli.pattern_child": set(),
    "llmcli.resources": set(),
    "llmcli.timeline": set(),
    "llmcli.differences": set(),
    "llmcli.openai_body": set(),
    "llmcli.tool_calls": set(),
    "llmcli.tools": set(),
    "llmcli.config": set(),
    "llmcli.checkpoint": {"llmcli.config", "llmcli.quantization"},
    "llmcli.quantization": set(),
    "llmcli.tokenizer": {"llmcli.config"},
    "llmcli.sampling": set(),
    "llmcli.schema": {"llmcli.tokenizer", "llmcli.sampling"},
    "llmcli.runners": {"llmcli.runners.base", "llmcli.config", "llmcli.sampling"},
    "llmcli.runners.base": {"llmcli.config", "llmcli.sampling"},
    "llmcli.runners.interrupts": set(),
    "llmcli.runners.pages": {"llmcli.runners.base"},
    "llmcli.runners.step_device": {"llmcli.runners.base", "llmcli.config", "llmcli.sampling"},
    "llmcli.runners.stepping": {
        "llmcli.runners.step_device",
        "llmcli.runners.base",
        "llmcli.runners.pages",
        "llmcli.runners.interrupts",
        "llmcli.config",
        "llmcli.sampling",
    },
    "llmcli.runners.host": {
        "llmcli.runners.base",
        "llmcli.runners.step_device",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.config",
        "llmcli.sampling",
    },
    "llmcli.runners.numpy": {
        "llmcli.runners.host",
        "llmcli.runners.base",
        "llmcli.runners.stepping",
        "llmcli.checkpoint",
        "llmcli.config",
    },
    "llmcli.runners.torch": {
        "llmcli.runners",
        "llmcli.runners.host",
        "llmcli.runners.base",
        "llmcli.runners.stepping",
        "llmcli.runners.step_device",
        "llmcli.kernels",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.config",
        "llmcli.sampling",
    },
    "llmcli.runners.cuda": {
        "llmcli.runners",
        "llmcli.runners.base",
        "llmcli.runners.stepping",
        "llmcli.runners.step_device",
        "llmcli.runners.interrupts",
        "llmcli.kernels",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.config",
        "llmcli.sampling",
    },
    "llmcli.engine": {
        "llmcli.runners.base",
        "llmcli.runners.interrupts",
        "llmcli.tokenizer",
        "llmcli.sampling",
        "llmcli.schema",
        "llmcli.config",
    },
    "llmcli.kernels": set(),
    "llmcli.lab": {
        "llmcli.kernels",
        "llmcli.runners.cuda",
        "llmcli.runners.base",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.config",
        "llmcli.sampling",
    },
    "llmcli.measure": {
        "llmcli.kernels",
        "llmcli.engine",
        "llmcli.runners.base",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.tokenizer",
        "llmcli.sampling",
        "llmcli.config",
    },
    "llmcli.batch": {
        "llmcli.schema",
        "llmcli.measure",
        "llmcli.engine",
        "llmcli.runners.base",
        "llmcli.tokenizer",
        "llmcli.sampling",
    },
    "llmcli.serve": {
        "llmcli.schema",
        "llmcli.engine",
        "llmcli.runners.base",
        "llmcli.tokenizer",
        "llmcli.sampling",
    },
    "llmcli.receipt": {
        "llmcli.engine",
        "llmcli.runners.base",
        "llmcli.kernels",
        "llmcli.checkpoint",
        "llmcli.sampling",
    },
    "llmcli.cli": {
        "llmcli.batch",
        "llmcli.serve",
        "llmcli.receipt",
        "llmcli.measure",
        "llmcli.schema",
        "llmcli.engine",
        "llmcli.runners.base",
        "llmcli.runners.host",
        "llmcli.runners.numpy",
        "llmcli.runners.torch",
        "llmcli.runners.cuda",
        "llmcli.kernels",
        "llmcli.lab",
        "llmcli.checkpoint",
        "llmcli.quantization",
        "llmcli.tokenizer",
        "llmcli.sampling",
        "llmcli.config",
    },
}
COMMON = {
    "llmcli",
    "llmcli.errors",
    "llmcli.reading",
    "llmcli.writing",
    "llmcli.destination_lock",
    "llmcli.patterns",
    "llmcli.resources",
    "llmcli.timeline",
    "llmcli.differences",
    "llmcli.openai_body",
    "llmcli.tool_calls",
    "llmcli.tools",
}
EXCLUSIVE = {
    "torch": {"llmcli.runners.torch"},
    "cupy": {"llmcli.kernels", "llmcli.lab", "llmcli.runners.cuda"},
    "safetensors": {"llmcli.checkpoint"},
    "llguidance": {"llmcli.schema"},
    "starlette": {"llmcli.serve"},
    "uvicorn": {"llmcli.serve"},
    "pydantic": {"llmcli.serve"},
    "ray": {"llmcli.batch"},
}
FORBIDDEN = {"transformers"}  # at run time; the tests use it

# Ctrl-C is handled from the first import on; a folder needs one of two tokenizer libraries; CuPy waits until a card is
# seen; huggingface_hub until its environment has been checked. The command line imports late by name, in LAZY.
LATE_IMPORTS = {
    "llmcli.__main__",
    "llmcli.checkpoint.hub_client",
    "llmcli.checkpoint.hub_library",
    "llmcli.kernels.device",
    "llmcli.lab.trial",
    "llmcli.resources",  # grp and pwd, which Windows lacks
    "llmcli.runners.cuda.step.arena",
    "llmcli.tokenizer.load",
}


LAZY = "llmcli.cli.lazy"


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "llmcli").rglob("*.py")
        if "resources" not in path.parts
    }


def room_of(module: str) -> str:
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from llmcli.checkpoint import reader` imports a module, `from llmcli import __version__` does not.
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules() else node.module


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_only_what_it_may(module: str) -> None:
    room = room_of(module)
    for imported in imports(modules()[module]):
        top = imported.split(".")[0]
        if top == "llmcli":
            other = room_of(imported)
            assert other in ROOMS[room] | COMMON | {room}, f"{module} (room {room}) imports {imported} (room {other})"
        for library, rooms in EXCLUSIVE.items():
            assert top != library or room in rooms, f"{module} imports {library}"
        assert top not in FORBIDDEN, f"{module} imports {top}"


def test_no_cycles() -> None:
    graph = {
        module: {imported for imported in imports(path) if imported in modules() and imported != module}
        for module, path in modules().items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", sorted(modules()))
def test_function_level_imports_only_where_they_have_a_reason(module: str) -> None:
    path = modules()[module]
    late = sorted(set(imports(path)) - set(imports(path, top_level_only=True)) - type_checking_imports(path))
    if late and module not in LATE_IMPORTS:
        pytest.fail(f"{module} imports {', '.join(late)} inside a function")


@pytest.mark.parametrize("module", sorted(module for module in modules() if module.startswith("llmcli.cli")))
def test_the_command_line_imports_late_in_one_module(module: str) -> None:
    """Besides it, the table of commands imports the command that was called."""
    if module not in (LAZY, "llmcli.cli.main"):
        text = modules()[module].read_text(encoding="utf-8")
        assert not re.search(r"import_module|__import__|importlib", text), module
        assert not re.search(rf"from {re.escape(LAZY)} import", text), f"{module} would import early"


def test_lazy_modules_are_there_and_are_used() -> None:
    """They are the imports that mypy reads; nothing else gives a name."""
    tree = ast.parse(modules()[LAZY].read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert all(isinstance(node, ast.ImportFrom) for node in block.body)
    declared = [alias.asname or alias.name for node in block.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(declared) == sorted(lazy.find_places())  # no name stands for two things
    used = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llmcli" / "cli").rglob("*.py"))
    for name, module in lazy.find_places().items():
        assert f"llmcli.{module}" in modules()
        assert re.search(rf"\blazy\.{name}\b", used), f"nobody uses {name}"


def type_checking_imports(path: Path) -> set[str]:
    """Names imported under `if TYPE_CHECKING:`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                assert isinstance(child, ast.ImportFrom)
                assert child.module is not None
                submodules = {f"{child.module}.{alias.name}" for alias in child.names}
                names |= {child.module} | (submodules & modules().keys())
    return names


@pytest.mark.parametrize("module", sorted(modules()))
def test_nothing_happens_at_import(module: str) -> None:
    """Module level holds definitions; the entry point is the one exception."""
    allowed = (
        ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
    )
    for node in ast.parse(modules()[module].read_text(encoding="utf-8")).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_start = module == "llmcli.__main__" and ast.unparse(node).startswith("if __name__ == ")
        assert isinstance(node, allowed) or is_docstring or is_type_checking or is_start, ast.unparse(node)


@pytest.mark.parametrize("folder", ["llmcli", "tests", "kernels"])
def test_no_file_is_too_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".cu", ".cuh"):
            count = len(path.read_text(encoding="utf-8").splitlines())
            assert count <= MAX_LINES, f"{path} has {count} lines"


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_says_what_it_owns(module: str) -> None:
    docstring = ast.get_docstring(ast.parse(modules()[module].read_text(encoding="utf-8")))
    assert docstring
    assert len(docstring) > 30


@pytest.mark.parametrize("module", sorted(modules()))
def test_only_the_command_line_prints(module: str) -> None:
    if not module.startswith("llmcli.cli"):
        calls = [node for node in ast.walk(ast.parse(modules()[module].read_text())) if isinstance(node, ast.Call)]
        assert not any(ast.unparse(call.func) in ("print", "sys.stdout.write", "sys.stderr.write") for call in calls)


def test_rooms_of_the_card_import_downwards() -> None:
    """What is planned knows nothing that runs; prices know the launches, and loading knows all."""
    floors = ("plan", "step", "predict", "load")
    rooms = {name: name.split(".")[3] for name in modules() if name.startswith("llmcli.runners.cuda.")}
    assert set(rooms.values()) == set(floors)
    for name, room in rooms.items():
        others = {rooms[other] for other in imports(modules()[name]) if other in rooms}
        assert others <= set(floors[: floors.index(room) + 1]), name
