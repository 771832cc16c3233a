"""Each kernel is whole: a header with every field, a launcher with a specification, a test, a place in the registry."""

import ast
import re
from pathlib import Path

import pytest

from llmcli.kernels.registry import KERNELS
from scripts.kernels_doc import PAGE, page, read_header

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ROOT / "llmcli" / "kernels"
SOURCES = sorted((ROOT / "kernels").glob("*.cu"))
CPU_SOURCES = sorted((ROOT / "kernels" / "cpu").glob("*.cpp"))
STUDIES = sorted((ROOT / "kernels" / "studies").glob("*.cu"))
ROWS = sorted((ROOT / "kernels" / "studies" / "rows").iterdir())
CUDA_FILES = [*SOURCES, *STUDIES, *ROWS, *sorted((ROOT / "kernels" / "common").glob("*.cuh"))]
MAX_LINES, MAX_COLUMNS = 450, 120
SYSTEM_INCLUDES = {"cuda_fp16.h", "cuda_bf16.h"}
STUDY_INCLUDES = {"cub/block/block_reduce.cuh", "cub/warp/warp_reduce.cuh"}  # the engine does without CUB

HEADER = """\
// add: c[i] = a[i] + b[i],
//      i < n          Source: a book
// Shapes:   a, b, c [n] float; Requires is a word like any other
// Requires: n >= 1
// Launch:   one block
//           of 32
// Traffic:  12 * n bytes
// Numerics: exact
// Choice:   none
#include "common/types.cuh"
"""


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "add.cu"
    path.write_text(HEADER)
    header = read_header(path)
    assert (header.stem, header.formula, header.source) == ("add", "c[i] = a[i] + b[i], i < n", "a book")
    assert header.fields == {
        "Shapes": "a, b, c [n] float; Requires is a word like any other",
        "Requires": "n >= 1",
        "Launch": "one block of 32",
        "Traffic": "12 * n bytes",
        "Numerics": "exact",
        "Choice": "none",
    }


@pytest.mark.parametrize("field", ["Shapes", "Requires", "Launch", "Traffic", "Numerics", "Choice", "Source"])
@pytest.mark.parametrize("change", ["missing", "empty"])
def test_a_header_without_a_field_is_refused(tmp_path: Path, field: str, change: str) -> None:
    path = tmp_path / "add.cu"
    text = re.sub(rf"{field}:.*(\n//     .*)?", "" if change == "missing" else f"{field}:", HEADER, count=1)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"add\.cu: the header"):
        read_header(path)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_source_has_header_launcher_test_and_registry_entry(path: Path) -> None:
    assert read_header(path).stem == path.stem
    assert path.stem in KERNELS
    tests = (ROOT / "tests" / "kernels" / f"test_{path.stem}.py").read_text(encoding="utf-8")
    assert "@pytest.mark.cuda" in tests or "pytestmark = pytest.mark.cuda" in tests


def test_every_specification_is_registered_and_has_a_source() -> None:
    specified = [stem for path in LAUNCHERS.glob("*.py") for stem in specified_stems(path)]
    assert sorted(specified) == list(KERNELS) == [path.stem for path in SOURCES]  # commands list them in this order


def specified_stems(path: Path) -> list[str]:
    """Of specifications that a module assigns to names, as the registry expects."""
    calls = [node.value for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    specs = [node for node in calls if isinstance(node, ast.Call) and ast.unparse(node.func) == "KernelSpec"]
    return [ast.literal_eval(spec.args[0]) for spec in specs]


@pytest.mark.parametrize("stem", sorted(KERNELS))
def test_specifications_name_kernels_of_their_source(stem: str) -> None:
    spec = KERNELS[stem]
    assert spec.op
    assert spec.variants
    assert len(set(spec.variants)) == len(spec.variants)
    text = (ROOT / "kernels" / f"{stem}.cu").read_text(encoding="utf-8")
    named = {variant.partition("<")[0] for variant in spec.variants}
    heads = re.findall(r"__global__([^{;]*)[{;]", text)
    defined = {name for head in heads for name in re.findall(r"(\w+)\(", head)}
    assert named <= defined, f"{named - defined} are not kernels of {stem}.cu"


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda path: path.name)
def test_sources_keep_to_the_rules(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES
    wide = [number for number, line in enumerate(lines, start=1) if len(line) > MAX_COLUMNS]
    assert not wide, f"lines {wide} have over {MAX_COLUMNS} columns"
    allowed = SYSTEM_INCLUDES | (STUDY_INCLUDES if path in STUDIES else set())
    assert set(re.findall(r"#include <(.+)>", text)) <= allowed
    assert "printf" not in text
    assert "TODO" not in text, "open work belongs in an issue, not in a shipped source"
    assert not re.search(r"atomicAdd\(\s*(?:reinterpret_cast<)?float", text)
    for own in re.findall(r'#include "(.+)"', text):
        assert (ROOT / "kernels" / own).is_file()
    assert (path.suffix == ".cuh") == ("#pragma once" in text)


def test_the_page_of_kernels_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.kernels_doc"


@pytest.mark.parametrize("path", CPU_SOURCES, ids=lambda path: path.stem)
def test_every_source_for_the_cpu_has_header_caller_and_test(path: Path) -> None:
    assert read_header(path).stem == path.stem
    caller = (ROOT / "llmcli" / "runners" / "torch" / f"{path.stem}.py").read_text(encoding="utf-8")
    assert f"kernels/cpu/{path.name}" in caller
    assert (ROOT / "tests" / "runners" / f"test_{path.stem}.py").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "kernels" / "cpu").iterdir()), ids=lambda path: path.name)
def test_sources_for_the_cpu_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
