"""The commands of tutorial, recipes and the page of schemas run as written; commands and options on all pages exist.

A line with the comment `# needs ...` is left out where that is missing. Tests have no network, so its lines never run.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from guide_pages import GUIDE, PAGES, ROOT, fenced, indented_lines
from safetensors.torch import load_file, save_file

from llmcli.cli.command import add_command
from llmcli.cli.main import COMMANDS
from llmcli.resources import STORYTELLER_BF16, resource_folder

MOST_TOKENS = "90"
NO_COMMANDS = {"COMMAND", "receipt"}  # a placeholder, and the name of a file's format
IS_THERE = {"the network": False, "jq": shutil.which("jq") is not None}


def lines_to_run(text: str) -> list[str]:
    """The command lines of a page, without those that need what is missing."""
    needs = [(line, re.search(r"# needs (the )?\w+", line)) for line in indented_lines(text)]
    return [line for line, need in needs if need is None or IS_THERE[need[0].removeprefix("# needs ")]]


def run_lines(lines: list[str], folder: Path, **environment: str) -> str:
    """Run lines as one script of bash in a folder, with a home of its own, and return what they print."""
    programs = folder.parent / "programs"
    programs.mkdir()
    program = programs / "llmcli"
    words = [str(ROOT / "tests" / "preloaded_program.py"), str(folder.parent / "socket")]
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    home = folder.parent / "home"
    home.mkdir()
    environment |= {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "LLMCLI_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    options: dict[str, Any] = {"cwd": folder, "env": environment, "text": True, "stdin": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, **options) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        script = ["bash", "-exo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(script, capture_output=True, check=False, **options)
        with socket.socket(socket.AF_UNIX) as last_call:
            last_call.connect(words[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, except for a quick model named like the one in 16 bits: two layers of it."""
    made = tmp_path / "empty"
    model = made / STORYTELLER_BF16
    shutil.copytree(resource_folder(STORYTELLER_BF16), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    weights = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not re.search(r"layers\.[^01]\.", name)}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    return made


def test_the_tutorial_runs_as_written(folder: Path) -> None:
    lines = lines_to_run((GUIDE / "tutorial.md").read_text(encoding="utf-8"))
    assert len(lines) > 15
    run_lines(lines, folder, MOST_TOKENS=MOST_TOKENS)
    assert (folder / "story.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert len((folder / "story.txt").read_text(encoding="utf-8").split()) > 50
    assert len((folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert (folder / "storyteller-int4" / "config.json").is_file()


def test_the_recipes_run_as_written(folder: Path) -> None:
    text = (GUIDE / "recipes.md").read_text(encoding="utf-8")
    (crontab,) = fenced(text, "cron")
    at_six = re.sub(r"^(\S+ ){5}", "", crontab).replace("\\%", "%")
    repository = ["git init --quiet", "echo 'One line.' > notes.txt", "git add notes.txt"]
    run_lines([*repository, *lines_to_run(text), at_six], folder, MOST_TOKENS=MOST_TOKENS)
    assert len((folder.parent / "home" / "story.txt").read_text(encoding="utf-8").split()) > 50
    assert len((folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert not (folder / "more.jsonl").exists()
    assert (folder / "diff.html").is_file()


def test_the_schemas_run_as_written(folder: Path) -> None:
    lines = lines_to_run((GUIDE / "schema.md").read_text(encoding="utf-8"))
    assert len(lines) == 9
    run_lines(lines, folder)
    schema = json.loads((folder / "story.json").read_text())
    jsonschema.validate(json.loads((folder / "story-1.json").read_text()), schema)
    samples = json.loads((folder / "stories.json").read_text())["samples"]
    assert len(samples) == 3
    for sample in samples:
        assert sample["is_complete"]
        jsonschema.validate(json.loads(sample["text"]), schema)
    fair = (folder / "fair.txt").read_text()
    assert re.fullmatch(r" [0-3][0-9]\. (May|June|July) at [0-9]{1,2} o'clock\n", fair)
    assert re.fullmatch(r"(The [a-z]{3,8} and the [a-z]{3,8}\. ){2}\n", (folder / "poem.txt").read_text())


def test_only_what_is_missing_is_left_out(tmp_path: Path) -> None:
    text = "    one\n    two   # needs the network: 5 MB\n    three  # needs jq\n    four # a comment\nno command\n"
    with_jq = ["three  # needs jq"] if IS_THERE["jq"] else []
    assert lines_to_run(text) == ["one", *with_jq, "four # a comment"]
    (tmp_path / "here").mkdir()
    with pytest.raises(AssertionError, match="false"):
        run_lines(["false | true", "true"], tmp_path / "here")


@cache
def options_of(command: str) -> set[str]:
    """Every way to write an option of a command; also those of subcommands."""
    entry = next(entry for entry in COMMANDS if entry.name == command)
    found = getattr(importlib.import_module(f"llmcli.cli.{entry.module}"), entry.attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer()
        add_command(app, "found", found)
        found = app
    click_command = typer.main.get_command(found)
    commands = [click_command, *getattr(click_command, "commands", {}).values()]
    return {
        name for part in commands for parameter in part.params for name in (*parameter.opts, *parameter.secondary_opts)
    }


def command_lines() -> list[tuple[str, str]]:
    """Every command line of ours on the pages for users, with its page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        quoted = re.findall(r"`((?:scripts/)?llmcli [^`]+)`", text)
        for line in [*indented_lines(text.replace("\\\n", "")), *quoted]:
            found += [(page.name, part) for part in re.findall(r"(?:^|\| )(?:scripts/)?llmcli (\w.+)", line)]
    return found


def test_the_pages_name_commands_and_options_that_exist() -> None:
    names = {entry.name for entry in COMMANDS}
    lines = command_lines()
    assert len(lines) > 100
    for page, line in lines:
        words = shlex.split(re.sub(r"[][<>|]|\.\.\.", " ", line.split(" | ")[0]), comments=True)
        if words[0] in NO_COMMANDS:
            continue
        assert words[0] in names, (page, line)
        known = options_of(words[0]) | {"--help", "--help-all", "-h"}
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in known, (page, line, word)
