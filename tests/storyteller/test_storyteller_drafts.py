"""The gain of drafts for the storyteller: the figures count what happened, and a changed text is an error."""

import re

import pytest
import torch
from storyteller import drafts
from storyteller.drafts import Figure, main, measure, table
from storyteller.evaluate import PRESET, held_out_questions
from storyteller.tellers import Voice
from storyteller.train import narrowed

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.run import open_draft
from llmcli.engine.draft_sources import DraftModel
from llmcli.engine.drafts import Drafting
from llmcli.resources import STORYTELLER, resource_folder

OPTIONS = RunnerOptions(**drafts.RUNNERS["numpy"])


@pytest.fixture(scope="module")
def voice():
    return Voice(resource_folder(STORYTELLER), PRESET, OPTIONS)


@pytest.fixture
def questions():
    return [messages for messages, _ in held_out_questions(3, 1)]


def test_the_storyteller_is_always_right_about_itself(voice, questions):
    itself = Voice(resource_folder(STORYTELLER), PRESET, OPTIONS).runner
    ways = {"off": None, "model": Drafting(DraftModel(itself), least=1)}
    off, model = measure(voice, ways, questions)
    assert off == Figure("off", 0, 0, 1.0, 1.0)
    assert model.num_drafts == model.num_kept > 3
    assert model.tokens_per_step > 1.5
    assert model.speed < 1  # a draft costs as much as what it saves, and on the CPU a step more


def test_a_text_that_drafts_change_is_told(voice, questions, monkeypatch):
    reply = drafts.reply

    def other(voice, request, drafting):
        token_ids, seconds = reply(voice, request, drafting)
        return token_ids[: -1 if drafting else None], seconds

    monkeypatch.setattr(drafts, "reply", other)
    ways = {choice: open_draft(choice, voice.session).load(voice.runner, OPTIONS, 1024) for choice in ("off", "ngram")}
    with pytest.raises(AssertionError, match=r"drafts change the reply to '.*', seed 1"):
        measure(voice, ways, questions)


def test_tables_are_printed_for_stories_and_questions(capsys, monkeypatch):
    monkeypatch.setattr(drafts, "held_out_requests", lambda count, seed: [("Hello! Who are you?", None)] * count)
    main(["--stories", "1", "--questions", "1"])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d+ \w+, numpy):$", printed, re.M) == ["1 stories, numpy", "1 questions, numpy"]
    assert re.findall(r"^\| (\w+) \|", printed, re.M) == ["drafts", "off", "auto", "ngram"] * 2
    line = table([Figure("auto", 2000, 500, 1.25, 0.987)]).splitlines()[-1]
    assert line == "| auto | 2,000 | 25% | 1.25 | 0.99 |"


def test_narrowed_embeddings_keep_what_tells_tokens_apart():
    torch.manual_seed(1)
    narrow = torch.randn(50, 8) @ torch.randn(8, 32)
    assert torch.allclose(narrowed(narrow, 8) @ narrowed(narrow, 8).T, narrow @ narrow.T, atol=1e-2)
    wide = torch.randn(50, 32) * torch.arange(32, 0, -1)
    lost = [
        (torch.cdist(narrowed(wide, width), narrowed(wide, width)) - torch.cdist(wide, wide)).norm()
        for width in (4, 16, 32)
    ]
    assert lost[0] > 2 * lost[1] > 4 * lost[2]
