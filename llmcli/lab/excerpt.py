"""Cuts out of a source what one rung is made of: its comment, its kernels, and the functions that these call.

What comes out is a file for `--try`, where a reader may begin.
"""

import re

from llmcli.lab.ladder import Source, kernel_names
from llmcli.lab.study_file import Rung

_CODE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*')  # braces in strings and comments are none
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)")
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
    """The parts between blank lines that stand in no braces."""
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
    """The names that a block defines at its top: functions, structures, constants, macros."""
    head, bodies = _LAUNCH_BOUNDS.sub("", _CODE.sub("", block)), 1
    while bodies:
        head, bodies = _INNERMOST_BODY.subn("", head)
    names = set(re.findall(r"(\w+)\s*\(", head))
    names |= set(re.findall(r"(?:struct|class|enum|#define|using)\s+(\w+)", head))
    return names | set(re.findall(r"constexpr\s+\w+\s+(\w+)", head)) | set(re.findall(r",\s*(\w+)\s*=", head))


def _comment(lines: list[str]) -> list[str]:
    end = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return lines[:end]


def _without_rungs(block: str) -> str:
    """A block without a rung's comment at its beginning, which may be another rung's."""
    lines = block.splitlines()
    comment = _comment(lines)
    return "\n".join(lines[len(comment) :] if comment and comment[0].startswith("// rung ") else lines)
