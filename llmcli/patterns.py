"""Matches names with regular expressions that a stranger may have written, within a time limit.

Python's `re` backtracks without end on patterns such as `(a+)+$`, and holds the interpreter meanwhile. Refusing those
by their looks would refuse good ones too, and a linear engine would differ from compressed-tensors, which uses `re`. So
`re` runs in a child process, all patterns and names at once (0.02 s), and is killed when it is late.
"""

import json
import reprlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmcli.errors import LLMCliError, foreign_errors_explained

# The start of a child process: this very llmcli, from its parent's folder, whatever else is installed.
#
# The folder itself is not in the child's search path: in a source tree it also holds `tests` and `scripts`.

_FOLDER = str(Path(__file__).resolve().parents[1])


def child_program(module: str, call: str = "main()", *, before: str = "") -> str:
    """A program for `python -c` that runs `call` of `module`. The statements `before` run before the import."""
    return (
        f"import sys; sys.path.insert(0, {_FOLDER!r}); import llmcli; del sys.path[0]; "
        f"{before}from {module} import main; {call}"
    )


TIME_LIMIT_SECONDS = 3.0  # for all patterns together; real ones take a millisecond
MAX_LENGTH = 4000  # of one pattern; real ones have less than 200 characters

# The isolated interpreter (-I, and -S without site-packages) finds nothing but the standard library and this program.
_CHILD = child_program("llmcli.pattern_child")


def match_names(
    patterns: Sequence[str], names: Sequence[str], where: str, error: type[LLMCliError], *, anywhere: bool = False
) -> dict[str, set[str]]:
    """The names that each pattern matches: from their beginning, as `re.match`, or `anywhere`, as `re.search`.

    Raises: `error`, beginning with `where`, for a pattern that is not a regular expression or does not end in time.
    """
    if not patterns:
        return {}
    for pattern in patterns:
        if len(pattern) > MAX_LENGTH:
            raise error(f"{where} {_shown(pattern)} is longer than {MAX_LENGTH} characters; write it shorter")
    request = {"patterns": list(patterns), "names": list(names), "anywhere": anywhere}
    with foreign_errors_explained(f"{where} {_shown(patterns[0])}", error):
        answers = _answers(json.dumps(request).encode())
    matched = {}
    for pattern, answer in zip(patterns, answers, strict=False):
        if "error" in answer:
            raise error(f"{where} {_shown(pattern)} is not a regular expression: {answer['error']}; correct it")
        matched[pattern] = {names[index] for index in answer["matched"]}
    if len(answers) < len(patterns):
        late = _shown(patterns[len(answers)])
        raise error(f"{where} {late} takes longer than {TIME_LIMIT_SECONDS:g} s to match; avoid nested repeats")
    return matched


def _answers(request: bytes) -> list[dict[str, list[int]]]:
    """The answers that came in time."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    try:
        output = subprocess.run(
            command, input=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIME_LIMIT_SECONDS
        ).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]


def _shown(pattern: str) -> str:
    return reprlib.repr(pattern)
