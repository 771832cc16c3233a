"""A conversation with the built-in storyteller: its answers are in the story that it told."""

import json
import subprocess
import sys

import pytest

MESSAGES = (
    "Tell me a story about a shy dragon called Tindra and a lantern.",
    "Who is the story about?",
    "What colour was the lantern?",
    "How did Tindra feel in the end?",
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_four_turns(device: str) -> None:
    messages = [word for message in MESSAGES for word in ("--message", message)]
    command = [sys.executable, "-m", "llmcli", "chat", "--device", device, "--seed", "1", "--json", *messages]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    story, who, colour, feeling = (turn["answer"].rstrip(".") for turn in json.loads(done.stdout)["turns"])
    assert "Tindra" in story
    assert "Tindra" in who
    # "The lantern is carrot orange.", and "carrot orange lantern" in the story; one of two words may be missing.
    assert f"{colour.split()[-1]} lantern" in story
    assert feeling.partition(" felt ")[2] in story
    assert feeling.partition(" felt ")[2]
