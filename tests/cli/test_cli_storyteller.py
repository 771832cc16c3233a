"""The built-in model, used if none is named: its messages, the source of its settings, and its stories."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from results import Llmcli

from llmcli.config.presets import load_preset
from llmcli.resources import STORYTELLER, STORYTELLER_BF16

SAID = "Using the built-in storyteller, a small demonstration (choose another model with --model)\n"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_it_tells_a_story_to_its_end(llmcli: Llmcli) -> None:
    answer = json.loads(llmcli("generate", "Once upon a time", "--seed", 1, "--json").stdout)
    assert answer["finish_reason"] == "eos"
    assert answer["model"] == STORYTELLER
    assert len(answer["token_ids"]) > 256  # longer than other models' default
    assert len(re.findall(r"[.!?]", answer["text"])) > 10
    assert answer["text"].count("\n\n") >= 2


def test_one_line_says_so(llmcli: Llmcli) -> None:
    arguments = ("generate", "Once", "--seed", 1, "--max-new-tokens", 4)
    first = llmcli(*arguments)
    assert first.stderr.startswith(SAID)
    assert first.stderr.count("\n") == 2  # and the line about the run
    assert llmcli(*arguments, "--quiet").stderr == ""
    named = llmcli(*arguments, "-m", STORYTELLER)
    assert named.stdout == first.stdout
    assert named.stderr == first.stderr.removeprefix(SAID)


def test_a_folder_of_its_name_is_a_folder(llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / STORYTELLER).mkdir()
    monkeypatch.chdir(tmp_path)
    llmcli("tokenize", "Hi", "-m", STORYTELLER).expect_error(3, STORYTELLER, "tokenizer")
    assert llmcli("tokenize", "Hi").exit_code == 0


def test_the_model_in_16_bits_has_a_name(
    llmcli: Llmcli, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = tmp_path / "package" / "resources"
    resources.mkdir(parents=True)
    monkeypatch.setattr("llmcli.resources._PACKAGE", resources.parent)
    monkeypatch.chdir(tmp_path)
    missing = llmcli("info", STORYTELLER_BF16)  # not in this package: a folder of that name, or nothing
    assert missing.exit_code != 0
    assert STORYTELLER_BF16 in missing.stderr
    assert str(tmp_path) not in missing.stderr
    (resources / STORYTELLER_BF16).symlink_to(tiny_llama)
    found = llmcli("info", STORYTELLER_BF16, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["folder"] == str(resources / STORYTELLER_BF16)
    assert llmcli("tokenize", "Hi", "-m", STORYTELLER_BF16).exit_code == 0
    (tmp_path / STORYTELLER_BF16).mkdir()
    assert llmcli("tokenize", "Hi", "-m", STORYTELLER_BF16).exit_code != 0  # a folder here wins


def test_its_defaults_are_the_story_preset(llmcli: Llmcli) -> None:
    stderr = llmcli("generate", "Once", "--seed", 1, "--max-new-tokens", 2, "--stats").stderr
    for name, value in load_preset("story").sampling.items():
        assert re.search(rf"^{name} +{value} \(generation_config.json\)$", stderr, re.MULTILINE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_answers_are_in_the_story_that_it_told(device: str) -> None:
    messages = (
        "Tell me a story about a shy dragon called Tindra and a lantern.",
        "Who is the story about?",
        "What colour was the lantern?",
        "How did Tindra feel in the end?",
        "Thank you!",
    )
    flags = [word for message in messages for word in ("--message", message)]
    command = [sys.executable, "-m", "llmcli", "chat", "--device", device, "--seed", "1", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(SAID)
    answer = json.loads(done.stdout)
    assert answer["model"] == STORYTELLER
    assert [turn["finish_reason"] for turn in answer["turns"]] == ["eos"] * 5
    story, who, colour, feeling, _ = (turn["answer"].rstrip(".") for turn in answer["turns"])
    assert "Tindra" in story
    assert "Tindra" in who
    # "The lantern is carrot orange.", and "carrot orange lantern" in the story; one of two words may be missing.
    assert f"{colour.split()[-1]} lantern" in story
    assert feeling.partition(" felt ")[2] in story
    assert feeling.partition(" felt ")[2]


@pytest.mark.parametrize("command", ["chat", "info", "eval"])
def test_a_model_is_named_once(llmcli: Llmcli, command: str) -> None:
    llmcli(command, "one", "--model", "two").expect_error(2, "the argument MODEL and --model cannot be combined")


@pytest.mark.parametrize("command", ["info", "eval"])
def test_the_model_may_be_a_flag(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path, command: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a mouse.")
    flags = ("--file", text) if command == "eval" else ()
    assert llmcli(command, tiny_llama, *flags).stdout == llmcli(command, "-m", tiny_llama, *flags).stdout
