"""Measures what drafts bring the storyteller: n-grams, auto and a draft model, over the same replies.

Each reply is given in every way before the next one begins, in another order each time, so that a busy machine is busy
for all. Every text must be the text without drafts. `scripts/storyteller/build FOLDER drafter` makes the draft model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.run import DRAFT_WORDS, open_draft
from llmcli.engine.draft_sources import DraftModel
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Finished, Request, Token
from llmcli.engine.scheduler import Generation
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner

from .evaluate import PRESET, held_out_questions, held_out_requests
from .tellers import Message, Voice

RUNNERS: dict[str, dict[str, Any]] = {
    "numpy": {"device": "cpu", "dtype": "auto", "num_threads": 1},
    "torch": {"device": "cpu", "dtype": "float32", "num_threads": 1},
    "cuda": {"device": "cuda", "dtype": "auto", "num_threads": None},
}


@dataclass(frozen=True)
class Figure:
    """One way over all prompts. `speed` is relative to the speed without drafts."""

    way: str
    num_drafts: int
    num_kept: int
    tokens_per_step: float
    speed: float


def seconds_of(runner: Runner) -> float:
    """Processor time if the model runs on the CPU, so that other programs do not count."""
    return time.perf_counter() if runner.limits.works_ahead else time.process_time()


def reply(voice: Voice, request: Request, drafting: Drafting | None) -> tuple[tuple[int, ...], float]:
    """A reply's tokens, and the seconds from its first token to its end."""
    start = 0.0
    for event in Generation(voice.runner, voice.session.tokenizer, request, drafting).events():
        if isinstance(event, Finished):
            return event.token_ids, seconds_of(voice.runner) - start
        if isinstance(event, Token):
            start = start or seconds_of(voice.runner)
    raise AssertionError("a generation ends with `Finished`")


def measure(voice: Voice, ways: Mapping[str, Drafting | None], prompts: Sequence[Sequence[Message]]) -> list[Figure]:
    """Figures of each way, "off" among them.

    Raises: AssertionError if drafts change a text
    """
    seconds = dict.fromkeys(ways, 0.0)
    names = list(ways)
    for seed, messages in enumerate(prompts, 1):
        said: dict[str, tuple[int, ...]] = {}
        names = [*names[1:], names[0]]
        request = voice.request(messages, seed)
        for way in names:
            said[way], taken = reply(voice, request, ways[way])
            seconds[way] += taken
        assert len(set(said.values())) == 1, f"drafts change the reply to {messages[-1]['content']!r}, seed {seed}"
    figures = []
    for way, drafting in ways.items():
        usage = None if drafting is None else drafting.usage
        counts = (usage.num_drafts, usage.num_kept, usage.tokens_per_step) if usage else (0, 0, 1.0)
        figures.append(Figure(way, *counts, seconds["off"] / seconds[way]))
    return figures


def table(figures: Sequence[Figure]) -> str:
    """The figures as Markdown."""
    lines = ["| drafts | made | kept | tokens a step | times the speed without |", "|---|---|---|---|---|"]
    for one in figures:
        share = f"{one.num_kept / one.num_drafts:.0%}" if one.num_drafts else "-"
        lines.append(f"| {one.way} | {one.num_drafts:,} | {share} | {one.tokens_per_step:.2f} | {one.speed:.2f} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """Read the command line, measure, and print a table for stories and one for questions about them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=resource_folder(STORYTELLER), help="a model folder")
    parser.add_argument("--drafter", type=Path, help="a draft model's folder; without it, none is measured")
    parser.add_argument("--stories", type=int, default=100)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the requests and questions")
    parser.add_argument("--runner", choices=RUNNERS, default="numpy", help="where the model runs")
    arguments = parser.parse_args(words)
    options = RunnerOptions(**RUNNERS[arguments.runner])
    voice = Voice(arguments.model, PRESET, options)
    told = {
        "stories": [[{"role": "user", "content": request}] for request, _ in
                    held_out_requests(arguments.stories, arguments.seed)],
        "questions": [messages for messages, _ in held_out_questions(arguments.questions, arguments.seed)],
    }  # fmt: skip
    for what, prompts in told.items():
        if not prompts:
            continue
        ways = {
            choice: open_draft(choice, voice.session).load(voice.runner, options, voice.context)
            for choice in DRAFT_WORDS
        }
        if arguments.drafter:
            draft = open_draft(str(arguments.drafter), voice.session)
            ways["model"] = draft.load(voice.runner, options, voice.context)
            assert draft.session is not None
            runner, _ = draft.session.load_runner(options, voice.context)
            ways["model, in every step"] = Drafting(DraftModel(runner), least=1)
        print(f"\n{len(prompts)} {what}, {arguments.runner}:\n")
        print(table(measure(voice, ways, prompts)), flush=True)


if __name__ == "__main__":
    main()
