"""The shipped model and its documents: the model card and the README show the model's real texts."""

import json
from pathlib import Path

import pytest
from storyteller.card import TEMPLATE, facts_of, write_card
from storyteller.evaluate import CHECKS, CRITERIA
from storyteller.model import Llama, Shape
from storyteller.told import beginning, quotations, quote, refresh, run_llmcli

from llmcli.cli.main import run
from llmcli.resources import STORYTELLER, resource_folder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = resource_folder(STORYTELLER)
CARD = FOLDER / "README.md"
# Elsewhere another CPU rounds differently, and after many words a draw may then differ.
WORDS_COMPARED = 40

SHOWN = [(path, *told) for path in (ROOT / "README.md", CARD) for told in quotations(path.read_text())]


def test_what_is_shown():
    commands = [command.split()[0] for path, command, _ in SHOWN if path == CARD]
    assert set(commands[:-1]) == {"generate"}
    assert commands[-1] == "chat"
    assert SHOWN[-1][1].count("--message") == 4
    readme = (ROOT / "README.md").read_text()
    first = next(line for line in readme.splitlines() if line.startswith("    scripts/"))
    assert first.startswith('    scripts/llmcli generate "Once upon a time" --seed ')
    assert SHOWN[0][1] == first.split("llmcli ")[1]


def test_a_card_shows_five_stories_of_consecutive_seeds():
    commands = [command for command, _ in quotations(TEMPLATE.read_text())]
    assert [command.split()[0] for command in commands] == ["generate"] * 5 + ["chat"]
    assert [command.split("--seed ")[1] for command in commands[:5]] == list("12345")


@pytest.mark.parametrize("shown", SHOWN, ids=[f"{path.parent.name}-{command[:20]}" for path, command, _ in SHOWN])
def test_the_commands_tell_what_is_shown(shown, capsys):
    _, command, quotation = shown
    words = quotation.split()
    assert len(words) > 100

    def begin(words):
        assert run([*words, "--quiet", "--max-new-tokens", "60"]) == 0
        return json.loads(capsys.readouterr().out)

    assert quote(command, begin).split()[:WORDS_COMPARED] == words[:WORDS_COMPARED]


def test_a_command_runs_in_a_process_of_its_own():
    assert run_llmcli(["generate", "Once", "--max-new-tokens", "1", "--json"])["text"]


def test_the_card_says_what_it_is():
    text = " ".join(CARD.read_text().split())
    for part in ("demonstration", "synthetic text only", "knows no facts", "scripts/storyteller/evaluate"):
        assert part in text
    assert "{" not in text.replace("{@", "")


def test_the_export_is_int8_and_as_good_as_its_source():
    config = json.loads((FOLDER / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {8}
    measured = json.loads((FOLDER / "quantization.json").read_text())["evaluation"]
    assert abs(measured["perplexity_after"] / measured["perplexity_before"] - 1) < 0.005


def examination(**figures):
    return {
        "preset": "story",
        "seed": 1,
        "counts": {
            "stories": 200,
            "outside": 24,
            "wishes": 200,
            "answers": 300,
            "own answers": 900,
            "prompts": 50,
            "training documents": 1234567,
        },
        "figures": {**{f"outside the grammar: {check}": 12.5 for check in CHECKS}, **figures},
    }


def test_the_facts_of_the_card():
    config = json.loads((FOLDER / "config.json").read_text())
    shape = Shape(**{name: config[name] for name in Shape().to_dict()})
    figures = {name: 77.7 for name, _, _ in CRITERIA}
    facts = facts_of(FOLDER, examination(**figures, **{"most of a story that one training story has": 31.4}))
    assert facts["num_parameters"] == f"{Llama(shape).num_parameters() / 1e6:.0f}"
    assert facts["seeds"] == "seeds 1 to 200"
    assert "1,234,567 training documents" in facts["closest"]
    assert "more than 31 % of the sentences" in facts["closest"]
    assert facts["figures"].count("| 77.7 % |") == len(CRITERIA)
    assert facts["figures"].count("| 12.5 % |") == len(CHECKS)
    assert facts_of(FOLDER, examination(wish=1.0))["closest"] == ""


def test_a_card_is_written(tmp_path, monkeypatch):
    for name in ("config.json", "quantization.json", "model.safetensors"):
        (tmp_path / name).symlink_to(FOLDER / name)
    monkeypatch.setattr("storyteller.card.refresh", lambda text, model: f"{text}told by {model}")
    write_card(tmp_path, examination(wish=96.5))
    text = (tmp_path / "README.md").read_text()
    assert "| the name and the thing asked for appear | 96.5 % | 95 % | 12.5 % |" in text
    assert text.endswith(f"told by {tmp_path}")


def test_quotations_are_told_anew():
    text = (
        'A\n\n    scripts/llmcli generate "Once  upon" --seed 3\n\n> **old**\n> text\n\nB\n\n'
        "    llmcli chat --message Hi\n\n>\n"
    )
    asked = []

    def run(words):
        asked.append(words)
        if words[0] == "chat":
            return {"turns": [{"message": "Hi", "answer": "Hello.\n\nYou!"}]}
        return {"text": " a time.\n\nEnd."}

    fresh = refresh(text, run, "folder")
    assert asked == [
        ["generate", "Once  upon", "--seed", "3", "--model", "folder", "--json"],
        ["chat", "--message", "Hi", "--model", "folder", "--json"],
    ]
    assert fresh == (
        'A\n\n    scripts/llmcli generate "Once  upon" --seed 3\n\n> **Once  upon** a time.\n>\n> End.\n\nB\n\n'
        "    llmcli chat --message Hi\n\n> **Hi**\n>\n> Hello.\n>\n> You!\n"
    )
    assert refresh(fresh, run) == fresh
    assert refresh("    llmcli generate x\n\nno quotation\n", run) == "    llmcli generate x\n\nno quotation\n"


def test_a_quotation_may_show_the_beginning_only():
    short, long = "> one two\n", "> " + "word " * 99 + "word\n"
    assert beginning(f"{short}>\n{long}>\n{short}>\n{short}") == f"{short}>\n{long}>\n> ...\n"
    assert beginning(f"{short}>\n{long}") == f"{short}>\n{long}"
    command = '    llmcli generate "A"\n\n'
    told = "\n\n".join([" b c", "word " * 99 + "word", "end"])
    fresh = refresh(f"{command}> old\n>\n> ...\n", lambda words: {"text": told}, "folder")
    assert fresh == f"{command}> **A** b c\n>\n{long}>\n> ...\n"
    assert refresh(fresh, lambda words: {"text": told}, "folder") == fresh
