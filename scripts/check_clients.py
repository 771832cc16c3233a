"""Runs the own examples of other programs' clients against `llmcli serve`, with a tiny model that calls tools.

    python -m scripts.check_clients [NAME ...] [--python PROGRAM] [--node-folder FOLDER]

The programs are in scripts/clients, one a client. PROGRAM is a Python that has the clients, FOLDER one in which npm has
installed those of JavaScript. Prints a table; what failed, and why, goes to stderr. Exits with 1 if anything failed.
What to install:

    pip install openai openai-agents instructor 'pydantic-ai-slim[openai]' 'smolagents[openai]' litellm dspy
    pip install langchain langchain-openai llama-index-llms-openai-like
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.calling_model import write_calling_model

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {path.stem.removeprefix("try_"): path for path in sorted((ROOT / "scripts" / "clients").glob("try_*"))}
MODEL = "calling"
SECONDS = 300  # for one client; most take five
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)|Cannot find module '([^']+)'")


@contextmanager
def served_model() -> Iterator[str]:
    """The address of a server of the model, which ends after the `with`."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_calling_model(Path(folder) / MODEL)
        command = [sys.executable, "-m", "llmcli", "serve", model, "--port", "0", "--device", "cpu"]
        server = subprocess.Popen(
            [*map(str, command), "--context", "16384"], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert server.stderr is not None
        try:
            lines = iter(server.stderr)
            address = next((found[0] for line in lines if (found := re.search(r"http://\S+:\d+", line))), None)
            if address is None:
                raise SystemExit("the server did not start")
            threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
            yield address
        finally:
            server.terminate()
            server.wait()


def run_client(path: Path, address: str, python: str, node_folder: Path) -> dict[str, Any]:
    """The report of one client: `package`, `version`, `results`; only `missing` if it is not installed."""
    settings = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "MODEL": MODEL}
    is_node = path.suffix == ".mjs"
    command = ["node" if is_node else python, str(path)]
    folder = node_folder if is_node else ROOT
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        return {"missing": command[0]}
    except subprocess.TimeoutExpired:
        return {"package": path.stem, "version": "", "results": {"all": f"failed: took more than {SECONDS} s"}}
    if ended.returncode:
        if found := _MISSING.search(ended.stderr):
            return {"missing": found[1] or found[2]}
        return {"package": path.stem, "version": "", "results": {"all": f"failed: {ended.stderr[-1000:]}"}}
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


def main() -> int:
    """Run the clients named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--node-folder", type=Path, default=Path())
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PROGRAMS):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    has_failed = False
    print("| client | version | passed |\n|---|---|---|")
    with served_model() as address:
        for name in arguments.names or PROGRAMS:
            report = run_client(PROGRAMS[name], address, arguments.python, arguments.node_folder)
            if "missing" in report:
                print(f"| {name} | | not installed: {report['missing']} |")
                continue
            results = report["results"]
            passed = [check for check, result in results.items() if result == "passed"]
            print(f"| {report['package']} | {report['version']} | {', '.join(passed).replace('_', ' ')} |", flush=True)
            for check in results.keys() - set(passed):
                has_failed = True
                print(f"{name}, {check} {results[check]}", file=sys.stderr)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
