"""Batches of the built-in model in processes, which are killed."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = ("--seed", "3")


def start(source: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llmcli", "batch", str(source), str(output), *SEED, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=output.parent)


def finish(process: subprocess.Popen[bytes]) -> str:
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (0, b""), stderr
    return stderr.decode()


def without_timings(path: Path) -> str:
    return re.sub(r'"timings": {[^}]*}', "", path.read_text())


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_prompts(path: Path, count: int, longest: int = 8) -> list[dict[str, object]]:
    """Prompts of a few words, and the most tokens of their texts; one is held by an expression."""
    draw = random.Random(count)
    words = (ROOT / "configs" / "texts" / "stories.txt").read_text(encoding="utf-8").split()
    lines: list[dict[str, object]] = []
    for _ in range(count):
        begin = draw.randrange(len(words) - longest - 1)
        prompt = " ".join(words[begin : begin + draw.randint(1, draw.choice((3, longest)))])
        lines.append({"prompt": prompt, "max_new_tokens": draw.randint(4, 12)})
    lines[2] = {"prompt": "Once", "regex": "[a-z ]{5,9}"}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return lines
