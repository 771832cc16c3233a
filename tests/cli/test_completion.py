"""The shell's completion, requested as shells do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from llmcli.cli.commands import COMMANDS
from llmcli.cli.main import main

Offered = Callable[[Path, str], list[str]]
ASK = "import sys; from llmcli.__main__ import main; sys.argv[1:] = []; main()"


def question(folder: Path, words: str) -> dict[str, str]:
    """What bash puts into the environment, and where models and presets are."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_LLMCLI_COMPLETE": "complete_bash"}
    return {"HF_HOME": str(folder / "hf"), "LLMCLI_HOME": str(folder / "home"), **asked}


def ask(folder: Path, words: str, *, code: str = ASK, **environment: str) -> subprocess.CompletedProcess[str]:
    """bash's question about the last word of a line; one that ends in a space asks for a new word."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    asked = kept | question(folder, words) | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=asked, capture_output=True, text=True, check=False)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    """The answer of this process, which is quicker than that of a new one."""

    def answer(folder: Path, words: str) -> list[str]:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
            monkeypatch.delenv(name)
        for name, value in question(folder, words).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))  # read when it was imported
        monkeypatch.setattr(sys, "argv", ["llmcli"])
        monkeypatch.chdir(folder)
        exit_code = main()
        said = capsys.readouterr()
        assert (exit_code, said.err) == (0, "")
        return said.out.split()

    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models in the cache, a model folder, another folder, and a preset."""
    for name in ("models--org--tiny", "models--org--big--one", "datasets--org--text"):
        (tmp_path / "hf" / "hub" / name).mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "home" / "presets").mkdir(parents=True)
    (tmp_path / "home" / "presets" / "strange.toml").write_text("[sampling]\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("llmcli dif", ["diff"]),
        ("llmcli models ", ["list", "rm"]),
        ("llmcli generate --preset ", ["precise", "story", "strange"]),
        ("llmcli generate --preset st", ["story", "strange"]),
        ("llmcli generate --device ", ["auto", "cpu", "cuda"]),
        ("llmcli generate --dtype b", ["bfloat16"]),
        ("llmcli generate --kv-cache ", ["auto", "int8"]),
        ("llmcli generate --stats ", ["start"]),
        ("llmcli generate --color ", ["prob"]),
        ("llmcli generate --max-n", ["--max-new-tokens"]),
        ("llmcli serve --spe", ["--speed-first"]),
        ("llmcli generate --dry-b", ["--dry-base", "--dry-breaker"]),  # of --help-all
        ("llmcli generate --help-", ["--help-all"]),
        ("llmcli generate --file ", []),  # files: the shell's own
        ("llmcli generate --html p", []),
        ("llmcli generate -m ", ["mine", "org/big--one", "org/tiny", "storyteller", "storyteller-bf16"]),
        ("llmcli chat org/t", ["org/tiny"]),
        ("llmcli chat --thinking ", ["show", "fold", "hide"]),
        ("llmcli chat --overflow ", ["drop-oldest", "stop"]),
        ("llmcli eval --against m", ["mine"]),
        ("llmcli plan Qwen", ["Qwen2.5-0.5B", "Qwen3-4B"]),
        ("llmcli bench --format ", ["int8", "int4", "awq", "fp8", "bf16"]),
        ("llmcli quantize mi", ["mine"]),
        ("llmcli quantize mine out --group-size ", ["32", "64", "128", "channel"]),
        ("llmcli models rm org/", ["org/big--one", "org/tiny"]),
        ("llmcli pull org/ti", ["org/tiny"]),
        ("llmcli diff mine o", ["org/big--one", "org/tiny"]),
        ("llmcli nonsense --f", []),
    ],
)
def test_values(offered: Offered, folder: Path, words: str, expected: list[str]) -> None:
    assert offered(folder, words) == expected


def test_paths_are_offered_as_they_are_typed(offered: Offered, folder: Path) -> None:
    assert offered(folder, f"llmcli chat {folder}/m") == [f"{folder}/mine"]
    assert offered(folder / "other", "llmcli chat ../m") == ["../mine"]


def test_commands(offered: Offered, folder: Path) -> None:
    assert offered(folder, "llmcli ") == [command.name for command in COMMANDS]


def test_other_shells(folder: Path) -> None:
    asked = {"COMP_WORDS": "", "_TYPER_COMPLETE_ARGS": "llmcli generate --device c"}
    zsh = ask(folder, "", _LLMCLI_COMPLETE="complete_zsh", **asked)
    assert (zsh.stderr, '"cpu"' in zsh.stdout, '"auto"' in zsh.stdout) == ("", True, False)
    fish = ask(folder, "", _LLMCLI_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **asked)
    assert (fish.stderr, fish.stdout.split()) == ("", ["cpu", "cuda"])


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"},  # our error
        {"HF_HOME": "/dev/null/nowhere"},  # the system's
        {"_LLMCLI_COMPLETE": "nonsense"},
        {"COMP_CWORD": "x"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_nothing_is_ever_printed_but_words(folder: Path, environment: dict[str, str]) -> None:
    result = ask(folder, "llmcli generate -m org/", **environment)
    assert result.stderr == ""
    assert "rror" not in result.stdout


def test_nothing_slow_is_imported(folder: Path) -> None:
    code = f"import atexit; atexit.register(lambda: print(sorted(slow & set(sys.modules)))); {ASK}"
    code = f"slow = {{'torch', 'numpy', 'tokenizers', 'transformers', 'prompt_toolkit', 'rich.markdown'}}; {code}"
    for words in ("llmcli plan ", "llmcli generate --preset ", "llmcli models rm "):
        assert ask(folder, words, code=code.replace("import atexit", "import atexit, sys")).stdout.endswith("[]\n")
