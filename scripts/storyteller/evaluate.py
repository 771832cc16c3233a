"""Examines a storyteller on held-out requests and questions, and prints the figures of the model card."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from pathlib import Path
from random import Random

from .checkers import Wish, has_phrase, is_right, judge_story
from .dialogue import Turn, fact_turns, phrase_request, story_turn
from .outside import OUTSIDE_REQUESTS
from .overlap import RUN_WORDS, masked_words, shared_runs
from .retold import questions_about
from .story import tell
from .tellers import Message, Teller, checkpoint_teller, command_teller


def wish_of(turn: Turn) -> Wish:
    """What the request of a held-out turn names; a pronoun counts where the request uses one or the name implies it."""
    facts = turn.story.facts
    name = facts["name"] if has_phrase(turn.user, facts["name"]) else ""
    thing = facts["thing"] if has_phrase(turn.user, facts["thing"]) else ""
    forms = {"she": ("her", "she"), "he": ("his", "he", "him")}.get(facts["pronoun"], ())
    is_said = any(has_phrase(turn.user, form) for form in forms)
    return Wish(name, thing, facts["pronoun"] if is_said else "")


def held_out_requests(num_stories: int, seed: int) -> list[tuple[str, Wish]]:
    """Requests with held-out names and things, each naming both."""
    random = Random(f"requests/{seed}")
    requests: list[tuple[str, Wish]] = []
    while len(requests) < num_stories:
        turn = story_turn(random, "test")
        wish = wish_of(turn)
        if wish.name and wish.thing:
            requests.append((turn.user, wish))
    return requests


def held_out_questions(num_questions: int, seed: int) -> list[tuple[list[Message], Turn]]:
    """Conversations that hold a held-out story and end in a question whose answer stands in it."""
    random = Random(f"questions/{seed}")
    questions: list[tuple[list[Message], Turn]] = []
    while len(questions) < num_questions:
        story = tell(random, "test")
        request = phrase_request(random, story)
        for turn in fact_turns(random, story)[:2]:
            messages = [("user", request), ("assistant", story.text), ("user", turn.user)]
            questions.append(([{"role": role, "content": text} for role, text in messages], turn))
    return questions[:num_questions]


def questions_about_own(records: list[dict[str, object]], seed: int) -> list[tuple[list[Message], Turn]]:
    """Conversations that hold a story the teller told itself and end in a question that the story answers."""
    random = Random(f"own/{seed}")
    return [
        (
            [
                {"role": "user", "content": str(record["request"])},
                {"role": "assistant", "content": str(record["story"])},
                {"role": "user", "content": turn.user},
            ],
            turn,
        )
        for record in records
        for turn in questions_about(random, str(record["story"]), str(record["name"]), str(record["things"][0]))[:2]
    ]


def _share(verdicts: list[bool]) -> float:
    return round(100 * sum(verdicts) / max(1, len(verdicts)), 1)


def examine_stories(
    teller: Teller, requests: list[tuple[str, Wish]], seed: int
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Shares of stories that pass each check, and every story with its verdicts."""
    replies = teller([[{"role": "user", "content": request}] for request, _ in requests], seed)
    records = [
        {
            "request": request,
            "story": reply.text,
            "name": wish.name,
            "things": [wish.thing],
            **judge_story(reply.text, wish, reply.is_finished),
        }
        for (request, wish), reply in zip(requests, replies, strict=True)
    ]
    checks = ("wish", "ended", "no repeats", "pronouns")
    return {check: _share([bool(record[check]) for record in records]) for check in checks}, records


def examine_answers(
    teller: Teller, questions: list[tuple[list[Message], Turn]], seed: int
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Share of right answers, in all and for each fact asked for often enough."""
    replies = teller([messages for messages, _ in questions], seed)
    records = [
        {
            "question": turn.user,
            "answer": reply.text,
            "expected": turn.value,
            "key": turn.key,
            "right": is_right(reply.text, turn.value),
        }
        for (_, turn), reply in zip(questions, replies, strict=True)
    ]
    figures = {"right answers": _share([bool(record["right"]) for record in records])}
    for key, count in Counter(record["key"] for record in records).most_common():
        if count >= 10:
            figures[f"right answers: {key}"] = _share(
                [bool(record["right"]) for record in records if record["key"] == key]
            )
    return figures, records


def main() -> None:
    """Examine, print the figures, and write them with every text."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--command", help="a command that answers a conversation, such as: llmcli generate --json")
    source.add_argument("--checkpoint", type=Path, help="a checkpoint of the training")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.model, with --checkpoint")
    parser.add_argument(
        "--manifest", type=Path, help="manifest.json of the training data: look for shared runs of words"
    )
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command:
        teller = command_teller(shlex.split(arguments.command))
    else:
        teller = checkpoint_teller(arguments.checkpoint, arguments.tokenizer)

    figures, stories = examine_stories(teller, held_out_requests(arguments.stories, arguments.seed), arguments.seed)
    outside_figures, outside = examine_stories(teller, list(OUTSIDE_REQUESTS), arguments.seed)
    answer_figures, answers = examine_answers(
        teller, held_out_questions(arguments.questions, arguments.seed), arguments.seed
    )
    own_figures, own_answers = examine_answers(teller, questions_about_own(stories, arguments.seed), arguments.seed)
    figures |= {"right answers about its own story": own_figures["right answers"]}
    figures |= answer_figures | {f"outside the grammar: {check}": share for check, share in outside_figures.items()}
    if arguments.manifest:
        runs = shared_runs(
            [(str(record["story"]), tuple(record["things"])) for record in stories],
            arguments.manifest,
            arguments.workers,
        )
        for record, shared in zip(stories, runs, strict=True):
            record["shared_runs"] = shared
        figures["no shared run of 25 words"] = _share([not shared for shared in runs])
        lengths = [len(masked_words(str(record["story"]), tuple(record["things"]))) for record in stories]
        num_runs = sum(max(0, length - RUN_WORDS + 1) for length in lengths)
        figures["runs of 25 words that are not shared"] = round(100 - 100 * sum(map(len, runs)) / max(1, num_runs), 2)
    for name, share in figures.items():
        print(f"{share:6.1f} %  {name}")
    arguments.out.write_text(
        json.dumps(
            {
                "figures": figures,
                "stories": stories,
                "outside": outside,
                "answers": answers,
                "own_answers": own_answers,
            },
            indent=1,
        )  # fmt: skip
    )


if __name__ == "__main__":
    main()
