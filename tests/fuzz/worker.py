"""Runs cases of the fuzzer: `python -m fuzz.worker BASE FIRST COUNT SEED`, one line of JSON for each on stdout.

A case is made anew from its number and the seed, so that `COUNT` 1 repeats one. A process of its own, because a case
may hang in C code, crash or fill the memory: the reader of the lines sees that.
"""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

import typer
from fuzz.targets import Target, target_of

from llmcli.cli import main as command_line
from llmcli.cli.main import EXIT_BUG, run
from llmcli.errors import LLMCliError

ALLOWED_EXITS = (0, 2, 3)
LIMIT_SECONDS = 5  # of the processor for a case


def run_case(base: Path, case: int, seed: int) -> str | None:
    """Damage one file, run what reads it and put it back; None, or what went wrong."""
    target = target_of(case)
    file = base / target.folder / target.file
    original = file.read_bytes()
    file.write_bytes(target.damage(Random(f"{seed} {case}"), original))
    try:
        return _use(target, base / target.folder, file)
    finally:
        file.write_bytes(original)


def _use(target: Target, folder: Path, file: Path) -> str | None:
    places = {"MODEL": str(folder), "FILE": str(file)}
    for command in target.commands:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            exit_code = run([places.get(word, word) for word in command])
        error = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        if exit_code not in ALLOWED_EXITS or len(error) != (exit_code != 0):
            return f"{command[0]} ends with {exit_code}: {said.getvalue()[-1500:]}"
    if target.door is not None:
        try:
            target.door(folder, file)
        except LLMCliError as error:
            if error.exit_code not in ALLOWED_EXITS:
                return f"exit code {error.exit_code}: {error}"
        except Exception:
            return f"exit code {EXIT_BUG}: {traceback.format_exc()[-1500:]}"
    return None


def build_programs_once() -> None:
    """Cache typer's form of each command: building it takes longer than most cases."""
    build, get_command = command_line._build_app, typer.main.get_command
    keep = functools.cache(lambda name: get_command(build([name])))
    command_line._build_app = lambda arguments: arguments[0]
    typer.main.get_command = keep


def main() -> None:
    """Run the cases that the arguments name."""
    first, count, seed = map(int, sys.argv[2:])
    build_programs_once()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(shutil.copytree(sys.argv[1], Path(folder) / "base"))
        os.environ["LLMCLI_HOME"] = str(base / "home")
        for case in range(first, first + count):
            print(json.dumps({"begins": case}), flush=True)
            start = time.process_time()
            problem, seconds = run_case(base, case, seed), time.process_time() - start
            if problem or seconds > LIMIT_SECONDS:
                problem = problem or f"takes {seconds:.1f} s"
                print(json.dumps({"case": case, "target": target_of(case).name, "problem": problem}), flush=True)
        print(json.dumps({"peak_bytes": peak_bytes()}), flush=True)


def peak_bytes() -> int:
    """The most memory that this process has held; getrusage would count what its parent held when it forked."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    main()
