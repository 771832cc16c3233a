"""Examines the storyteller on held-out requests and questions: prints a table, writes every text and verdict as JSON.

The model is the shipped one unless another folder is named, run by llmcli's own engine on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from llmcli.resources import STORYTELLER, resource_folder

from .by_hand import HandWish, broken_words, hand_wishes, judge_heroes
from .checkers import Wish, has_phrase, is_right, judge_story, stumbles
from .dialogue import Turn, fact_turns, phrase_request, story_turn
from .originality import closest_shares, training_words, words_in
from .outside import OUTSIDE_PROMPTS, OUTSIDE_REQUESTS
from .retold import questions_about
from .sentences import masked_sentences, shared_sentences
from .story import tell
from .tellers import Message, PooledTeller, Teller

HERE = Path(__file__).resolve().parent
PRESET = "story"
# What people ask for: fewer rare names and things than the training text has.
ASKED_RARE_SHARE = 0.15
CHECKS = ("wish", "ended", "no repeats", "pronouns", "no stumbles", "few images")
SHOWN_KEYS = 10  # facts asked for at least this often have a figure of their own

# Figure, what it means, what is wanted.
CRITERIA = (
    ("wish", "the name and the thing asked for appear", 95.0),
    ("ended", "the story ends by itself", 95.0),
    ("no repeats", "no sentence stands there twice", 95.0),
    ("pronouns", "pronouns agree", 95.0),
    ("no stumbles", "no word stands there twice in a row", 95.0),
    ("few images", "no paragraph has more than three comparisons", 95.0),
    ("right answers", "questions about held-out stories answered right", 85.0),
    ("right answers about its own story", "questions about its own stories answered right", 85.0),
    ("own sentences", "sentences that no other of the stories has, names and things masked", 95.0),
    ("no copy", "stories of which no training story has more than half the sentences", 100.0),
    ("unbroken", "stories for wishes written by hand in which every word is a word", 100.0),
    ("hero", "those that are of the hero wished for, and of no other kind", 95.0),
    ("both heroes", "those for two heroes that have both", 85.0),
    ("words", "words that are words, after beginnings that the grammar cannot emit", 99.5),
)

Figures = dict[str, float]
Records = list[dict[str, object]]


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
        turn = story_turn(random, "test", rare_share=ASKED_RARE_SHARE)
        wish = wish_of(turn)
        if wish.name and wish.thing:
            requests.append((turn.user, wish))
    return requests


def _conversation(request: str, story: str, question: str) -> list[Message]:
    texts = (("user", request), ("assistant", story), ("user", question))
    return [{"role": role, "content": text} for role, text in texts]


def held_out_questions(num_questions: int, seed: int) -> list[tuple[list[Message], Turn]]:
    """Conversations that hold a held-out story and end in a question whose answer stands in it."""
    random = Random(f"questions/{seed}")
    questions: list[tuple[list[Message], Turn]] = []
    while len(questions) < num_questions:
        story = tell(random, "test")
        request = phrase_request(random, story)
        questions += [(_conversation(request, story.text, turn.user), turn) for turn in fact_turns(random, story)[:2]]
    return questions[:num_questions]


def questions_about_own(records: Records, seed: int) -> list[tuple[list[Message], Turn]]:
    """Conversations with a story by the teller itself and end in a question that the story answers."""
    random = Random(f"own/{seed}")
    return [
        (_conversation(str(record["request"]), str(record["story"]), turn.user), turn)
        for record in records
        for turn in questions_about(random, str(record["story"]), str(record["name"]), str(record["thing"]))
    ]


def _share(verdicts: list[bool]) -> float:
    return round(100 * sum(verdicts) / max(1, len(verdicts)), 1)


def examine_stories(teller: Teller, requests: list[tuple[str, Wish]], seed: int) -> tuple[Figures, Records]:
    """Shares of stories that pass each check, and every story with its verdicts."""
    replies = teller([[{"role": "user", "content": request}] for request, _ in requests], seed)
    records: Records = [
        {
            "request": request,
            "seed": seed + index,
            "story": reply.text,
            "name": wish.name,
            "thing": wish.thing,
            **judge_story(reply.text, wish, reply.is_finished),
        }
        for index, ((request, wish), reply) in enumerate(zip(requests, replies, strict=True))
    ]
    return {check: _share([bool(record[check]) for record in records]) for check in CHECKS}, records


def examine_wishes(teller: Teller, wishes: Sequence[HandWish], seed: int, known: set[str]) -> tuple[Figures, Records]:
    """Shares of stories for wishes written by hand without a broken word, of the right hero, and of both heroes."""
    replies = teller([[{"role": "user", "content": wish.text}] for wish in wishes], seed)
    records: Records = []
    verdicts: dict[str, list[bool]] = {}
    for index, (wish, reply) in enumerate(zip(wishes, replies, strict=True)):
        broken = broken_words(reply.text, wish.text, known)
        judged = {"unbroken": not broken, **judge_heroes(reply.text, wish)}
        for check, is_right_so in judged.items():
            verdicts.setdefault(check, []).append(is_right_so)
        records.append(
            {"request": wish.text, "seed": seed + index, "story": reply.text, "broken": broken, **judged}
        )  # fmt: skip
    return {check: _share(judged) for check, judged in verdicts.items()}, records


def examine_answers(teller: Teller, questions: list[tuple[list[Message], Turn]], seed: int) -> tuple[Figures, Records]:
    """Share of right answers, in all and for each fact asked for often enough."""
    replies = teller([messages for messages, _ in questions], seed)
    records: Records = [
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
        if count >= SHOWN_KEYS:
            of_key = [bool(record["right"]) for record in records if record["key"] == key]
            figures[f"right answers: {key}"] = _share(of_key)
    return figures, records


def _masked(stories: Records) -> list[list[str]]:
    return [masked_sentences(str(record["story"]), str(record["thing"])) for record in stories]


def examine_sentences(stories: Records) -> Figures:
    """Share of sentences that no other of the stories has; those that one has are noted in the records."""
    masked = _masked(stories)
    shared = shared_sentences(masked)
    for record, sentences in zip(stories, shared, strict=True):
        record["shared_sentences"] = sentences
    share = sum(map(len, shared)) / max(1, sum(map(len, masked)))
    return {"own sentences": round(100 - 100 * share, 1)}


def examine_copies(stories: Records, manifest: Path, workers: int) -> Figures:
    """Share of stories that have at most half their sentences in common with any training story."""
    closest = closest_shares(_masked(stories), manifest, workers)
    for record, share in zip(stories, closest, strict=True):
        record["closest"] = round(share, 3)
    return {
        "no copy": _share([share <= 0.5 for share in closest]),
        "most of a story that one training story has": round(100 * max(closest, default=0.0), 1),
    }


def examine_words(teller: Teller, prompts: Sequence[str], seed: int, known: set[str]) -> tuple[Figures, Records]:
    """Share of words that are known or stand in the prompt, and of continuations that do not stumble."""
    replies = teller(prompts, seed)
    records: Records = []
    num_words = num_strange = 0
    for index, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        # The first word may finish the prompt's last one.
        text = (
            reply.text if not prompt[-1:].isalpha() or not reply.text[:1].isalpha() else prompt.split()[-1] + reply.text
        )
        words = words_in(text)
        strange = [word for word in words if word not in known and word not in words_in(prompt)]
        num_words += len(words)
        num_strange += len(strange)
        records.append({"prompt": prompt, "seed": seed + index, "text": reply.text, "strange": strange})
    return {
        "words": round(100 - 100 * num_strange / max(1, num_words), 2),
        "continuations without a stumble": _share([not stumbles(str(record["text"])) for record in records]),
    }, records


def examine(arguments: argparse.Namespace) -> dict[str, object]:
    """All figures and every text."""
    start = time.time()

    def report(what: str) -> None:
        print(f"{time.time() - start:5.0f} s  {what}", flush=True)

    seed = arguments.seed
    with PooledTeller(arguments.model, PRESET, arguments.workers) as teller:
        figures, stories = examine_stories(teller, held_out_requests(arguments.stories, seed), seed)
        report(f"{len(stories)} stories")
        outside_figures, outside = examine_stories(teller, list(OUTSIDE_REQUESTS[: arguments.prompts]), seed)
        report(f"{len(outside)} stories for requests that the grammar cannot emit")
        answer_figures, answers = examine_answers(teller, held_out_questions(arguments.questions, seed), seed)
        report(f"{len(answers)} answers about held-out stories")
        own_questions = questions_about_own(stories, seed)[: arguments.questions]
        own_figures, own_answers = examine_answers(teller, own_questions, seed)
        report(f"{len(own_answers)} answers about its own stories")
        known = training_words(json.loads(arguments.manifest.read_text())["seed"])
        wish_figures, wished = examine_wishes(teller, hand_wishes()[:: arguments.every], seed, known)
        report(f"{len(wished)} stories for wishes written by hand")
        word_figures, continuations = examine_words(teller, OUTSIDE_PROMPTS[: arguments.prompts], seed, known)
        report(f"{len(continuations)} beginnings that the grammar cannot emit")
    figures |= {"right answers about its own story": own_figures["right answers"]}
    figures |= wish_figures | word_figures
    num_documents = 0
    if not arguments.quick:
        figures |= examine_sentences(stories)
        figures |= examine_copies(stories, arguments.manifest, arguments.workers)
        num_documents = sum(json.loads(arguments.manifest.read_text())["documents"])
        report(f"{num_documents:,} training documents told again")
    figures |= answer_figures | {f"outside the grammar: {check}": share for check, share in outside_figures.items()}
    return {
        "preset": PRESET,
        "seed": seed,
        "counts": {
            "stories": len(stories),
            "outside": len(outside),
            "wishes": len(wished),
            "answers": len(answers),
            "own answers": len(own_answers),
            "prompts": len(continuations),
            "training documents": num_documents,
        },
        "figures": figures,
        "stories": stories,
        "outside": outside,
        "wishes": wished,
        "answers": answers,
        "own_answers": own_answers,
        "continuations": continuations,
    }


def print_table(figures: Figures) -> None:
    """What was wanted, then the rest."""
    wanted = {name: share for name, _, share in CRITERIA}
    for name in [*(name for name in wanted if name in figures), *(name for name in figures if name not in wanted)]:
        verdict = ("met" if figures[name] >= wanted[name] else "missed") if name in wanted else ""
        goal = f"wanted {wanted[name]:5.1f} %  {verdict:<8}" if name in wanted else " " * 24
        print(f"{figures[name]:6.1f} %  {goal}{name}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/storyteller/evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=resource_folder(STORYTELLER), help="a model folder")
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first reply; the others count on")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "build" / "storyteller" / "evaluation.json")
    parser.add_argument(
        "--manifest", type=Path, default=HERE / "manifest.json",
        help="of the training text, which is told again to look for copies",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=len(OUTSIDE_PROMPTS), help="beginnings outside the grammar")
    parser.add_argument("--every", type=int, default=1, help="take one of so many of the wishes written by hand")
    parser.add_argument(
        "--quick", action="store_true", help="a look in a few minutes: little of each, stories not compared"
    )
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.stories, arguments.questions = min(arguments.stories, 20), min(arguments.questions, 30)
        arguments.prompts = min(arguments.prompts, 16)
        arguments.every = max(arguments.every, 10)
    return arguments


def main() -> None:
    """Examine, print the figures, and write them with every text."""
    arguments = parse()
    result = examine(arguments)
    print_table(result["figures"])  # type: ignore[arg-type]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"every text: {arguments.out}")


if __name__ == "__main__":
    main()
