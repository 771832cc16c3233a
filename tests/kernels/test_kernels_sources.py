"""Flattened sources: each include once, in place, and every line still known by its file and number."""

import re
from pathlib import Path

import pytest

from llmcli.kernels.sources import flatten, kernels_folder


def write(folder: Path, **files: str) -> None:
    (folder / "common").mkdir()
    for name, text in files.items():
        path = folder / f"{name}.cu" if name == "kernel" else folder / "common" / f"{name}.cuh"
        path.write_text(text, encoding="utf-8")


def origins(text: str) -> list[tuple[str, str]]:
    """(file:line, text) of every line, by the preprocessor's rule for #line."""
    file, number, found = "", 0, []
    for line in text.splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, file = int(directive[1]), directive[2]
        else:
            found.append((f"{file}:{number}", line))
            number += 1
    return found


def test_includes_are_inlined_once_and_lines_keep_their_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        kernel='#include "common/a.cuh"\n#include <cuda_fp16.h>\n  # include "common/b.cuh"  // why\nint k;\n',
        a='#pragma once\n\n#include "common/b.cuh"\nint a;\n',
        b="// first\n#pragma once\nint b;",
    )
    expected = {
        "kernels/kernel.cu:2": "#include <cuda_fp16.h>",
        "kernels/kernel.cu:4": "int k;",
        "kernels/common/a.cuh:4": "int a;",
        "kernels/common/b.cuh:1": "// first",
        "kernels/common/b.cuh:3": "int b;",
    }
    lines = [(place, text) for place, text in origins(flatten("kernel", tmp_path)) if text]
    assert sorted(lines) == sorted(expected.items())
    order = [text for _, text in lines]
    assert order.index("int b;") < order.index("int a;") < order.index("int k;")


def test_the_text_does_not_name_the_folder(tmp_path: Path) -> None:
    write(tmp_path, kernel='#include "common/a.cuh"\n', a="int a;\n")
    assert str(tmp_path) not in flatten("kernel", tmp_path)


def test_a_missing_include_is_named_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, kernel='\n#include "common/none.cuh"\n')
    with pytest.raises(
        ValueError, match=r"kernels/common/none\.cuh does not exist, included from kernels/kernel\.cu:2"
    ):
        flatten("kernel", tmp_path)


def test_other_characters_than_ascii_are_refused(tmp_path: Path) -> None:
    write(tmp_path, kernel="// \u00b5s\n")
    with pytest.raises(ValueError, match=r"kernels/kernel\.cu is not ASCII at byte 3"):
        flatten("kernel", tmp_path)


def test_every_kernel_of_the_project_flattens() -> None:
    for path in kernels_folder().glob("*.cu"):
        text = flatten(path.stem)
        assert '#include "' not in text
        assert "#pragma once" not in text
