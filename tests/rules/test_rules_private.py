"""Private parts of libraries are used only where docs/decisions/libraries.md gives the reason, line by line."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "decisions" / "libraries.md"
ROW = re.compile(r"^\| `(?P<name>[\w.]+)` \| (?P<files>[^|]+) \| (?P<reason>[^|]+) \|$", re.MULTILINE)

# Private without an underscore: modules that their project's reference does not describe.
PRIVATE = ("cupy_backends", "cupy.cuda.function", "cupy.cuda.compiler", "huggingface_hub.file_download")
# Of huggingface_hub's modules only these names are described.
PUBLIC_UTILS = {"huggingface_hub.utils.logging", "huggingface_hub.utils.validate_repo_id"}


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] in ("llmcli", "__future__", "_typeshed"):
        return False
    if name.startswith("huggingface_hub.utils.") and ".".join(parts[:3]) not in PUBLIC_UTILS:
        return True
    has_underscore = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return has_underscore or any(f"{name}.".startswith(f"{private}.") for private in PRIVATE)


def dotted(node: ast.AST) -> str | None:
    """The dotted name of an expression `a.b.c`."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def uses(source: str) -> Iterator[str]:
    """The names of libraries that a module imports, by statement or by call, and those that it reaches by attribute."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                name = alias.name if alias.asname else alias.name.split(".")[0]
                modules[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and (dotted(node.func) or "").endswith("import_module"):
            named = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            assert isinstance(named, ast.Constant), "an import by a computed name"
            assert named is node.args[0] or named.value.startswith("llmcli."), "an import by a computed name"
            yield named.value
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name is not None and name.split(".")[0] in modules:
            root, rest = name.split(".", 1)
            yield f"{modules[root]}.{rest}"


def private_uses(source: str) -> set[str]:
    """Without names that are part of another."""
    found = {name for name in uses(source) if is_private(name)}
    return {name for name in found if not any(name.startswith(f"{other}.") for other in found)}


def test_every_private_part_stands_in_the_table_with_its_reason() -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "llmcli").rglob("*.py"):
        for name in private_uses(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    section = PAGE.read_text(encoding="utf-8").partition("## Private parts of libraries")[2].partition("\n## ")[0]
    table = {row["name"]: set(re.findall(r"`([^`]+)`", row["files"])) for row in ROW.finditer(section)}
    assert found == table


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import cupy._core.raw", {"cupy._core.raw"}),
        ("from cupy.cuda import function", {"cupy.cuda.function"}),
        ("import cupy\ncupy.cuda.function.Module()", {"cupy.cuda.function"}),
        ("def f():\n    from typer import _click", {"typer._click"}),
        ("from importlib import import_module\nimport_module('cupy_backends.cuda.api')", {"cupy_backends.cuda.api"}),
        ("from huggingface_hub.utils import WeakFileLock, logging", {"huggingface_hub.utils.WeakFileLock"}),
        ("from torch import ops\nops.aten._x(1)._y", {"torch.ops.aten._x"}),
        ("import torch.nn.functional as F\nF._z", {"torch.nn.functional._z"}),
        ("import os, cupy\nos._exit(1)\ncupy.RawModule\ncupy.__version__\nself._x", set()),
        ("from llmcli.kernels import _x\nfrom __future__ import annotations", set()),
    ],
)
def test_private_parts_are_found(source: str, names: set[str]) -> None:
    assert private_uses(source) == names
