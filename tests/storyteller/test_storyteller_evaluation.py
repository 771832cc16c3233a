"""The examination of the shipped model: tellers, checkers, and the gain of drafts."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from storyteller import drafts, evaluate, originality, tellers
from storyteller.by_hand import HandWish, hand_wishes, parse_hero
from storyteller.checkers import Wish, is_right, judge_story, num_images, stumbles
from storyteller.corpus import document_with_stories, shard_random
from storyteller.dialogue import fact_turns
from storyteller.drafts import Figure, main, measure, table
from storyteller.evaluate import (
    PRESET,
    examine,
    held_out_questions,
    held_out_requests,
    parse,
    print_table,
    questions_about_own,
)
from storyteller.held_out import held_out_text
from storyteller.originality import closest_shares, training_words, words_in
from storyteller.sentences import masked_sentences, sentences_of, shared_sentences
from storyteller.split import is_held_out
from storyteller.story import tell
from storyteller.tellers import PooledTeller, Reply, Voice, _groups
from storyteller.train import narrowed

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.main import run
from llmcli.cli.run import open_draft
from llmcli.engine.draft_sources import DraftModel
from llmcli.engine.drafts import Drafting
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.tokenizer.load import load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "storyteller"
FOLDER = resource_folder(STORYTELLER)


@pytest.fixture
def llmcli(capsys):
    """What a command prints as JSON."""

    def call(*arguments):
        assert run([*map(str, arguments), "--json", "--quiet", "--threads", "1"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_the_teller_answers_as_the_command_line_does(llmcli):
    with PooledTeller(FOLDER, "story", 1) as teller:
        (reply,) = teller([[{"role": "user", "content": "Hello!"}]], 12)
    answer = llmcli("generate", "--chat", "Hello!", "--seed", 12, "--preset", "story", "--device", "cpu")
    assert (reply.text, reply.is_finished) == (answer["text"], answer["finish_reason"] == "eos")
    assert reply.is_finished


def test_a_question_is_answered_as_in_a_conversation(llmcli):
    messages = ["Hello!", "Thank you!"]
    turns = llmcli("chat", "--seed", 3, "--message", messages[0], "--message", messages[1], "--device", "cpu")["turns"]
    history = [{"role": "user", "content": messages[0]}, {"role": "assistant", "content": turns[0]["answer"]}]
    voice = Voice(FOLDER, "story")
    assert voice.reply(history[:1], 3).text == turns[0]["answer"]
    assert voice.reply([*history, {"role": "user", "content": messages[1]}], 3).text == turns[1]["answer"]


def test_questions_about_one_story_stay_together():
    def ask(*texts):
        return [{"role": "user", "content": text} for text in texts]

    groups = _groups([ask("a"), ask("b"), ask("s", "1"), ask("s", "2"), ask("t", "1"), "text", "more"], 7)
    assert [[seed for _, seed in group] for group in groups] == [[7], [8], [9, 10], [11], [12], [13]]


def test_requests_name_what_is_held_out():
    requests = held_out_requests(40, 1)
    assert requests == held_out_requests(40, 1)
    assert all(is_held_out("name", wish.name) for _, wish in requests)
    assert all(wish.name.lower() in request.lower() and wish.thing in request.lower() for request, wish in requests)


def test_held_out_text_is_stories_as_the_model_saw_them():
    tokenizer = load_tokenizer(FOLDER)
    ids = tokenizer.encode(held_out_text(5))
    bos, eos = tokenizer.bos_token_id, 2
    assert [ids.count(bos), ids.count(eos), ids[0], ids[-1]] == [5, 5, bos, eos]
    assert all(following == bos for token, following in zip(ids, ids[1:], strict=False) if token == eos)


class Beginner(PooledTeller):
    """The shipped model in this process; its texts are cut."""

    def __init__(self, folder, preset, workers):
        self.voice = Voice(folder, preset)
        self.voice.context = 700

    def __exit__(self, *_):
        """There is no pool."""

    def __call__(self, prompts, seed):
        return [
            self.voice.go_on(prompt, seed + index) if isinstance(prompt, str) else self.reply(prompt, seed + index)
            for index, prompt in enumerate(prompts)
        ]

    def reply(self, messages, seed):
        request = self.voice.request(messages, seed)
        return self.voice._generate(replace(request, max_new_tokens=60))


@pytest.fixture(scope="module")
def examination():
    """Two stories, one for a request that the grammar cannot emit, two answers, and answers about the two stories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "PooledTeller", Beginner)
        patch.setattr(originality, "WORD_LIST_DOCUMENTS", 300)
        patch.setattr(tellers, "CONTINUATION_TOKENS", 40)
        patch.setattr(evaluate, "OUTSIDE_REQUESTS", [("A goose named Gerda and a bucket.", Wish("Gerda", "bucket"))])
        words = "--stories 2 --questions 2 --workers 1 --prompts 2 --every 100 --quick"
        return examine(parse(words.split()))


def test_figures_are_shares_of_the_verdicts(examination):
    figures, stories = examination["figures"], examination["stories"]
    for check in evaluate.CHECKS:
        assert figures[check] == 100 * sum(record[check] for record in stories) / 2
        assert figures[f"outside the grammar: {check}"] == 100 * examination["outside"][0][check]
    assert figures["right answers"] == 100 * sum(record["right"] for record in examination["answers"]) / 2
    assert len(examination["own_answers"]) == min(2, len(questions_about_own(stories, 1)))
    assert [len(record["text"]) > 20 for record in examination["continuations"]] == [True, True]
    assert [record["seed"] for record in stories] == [1, 2]
    assert [record["request"] for record in examination["wishes"]] == [wish.text for wish in hand_wishes()[::100]]
    assert figures["hero"] == 50 * sum(record["hero"] for record in examination["wishes"])


def test_each_wish_is_judged_by_what_it_asks_for():
    wishes = [
        HandWish(0, "a mouse", (parse_hero("(mouse)"),)),
        HandWish(0, "a cat and a dog", (parse_hero("(cat; old)"), parse_hero("(dog)"))),
    ]
    mouse = "There was a small mouse called Mia, who lived in a blorf. Mia felt glad."
    cat = "There was an old cat called Max, who lived here. Max felt glad, and that was all."

    def teller(prompts, seed):
        assert prompts == [[{"role": "user", "content": wish.text}] for wish in wishes]
        return [Reply(mouse, True), Reply(cat, True)]

    figures, records = evaluate.examine_wishes(teller, wishes, 7, set())
    assert figures == {"unbroken": 50.0, "hero": 100.0, "both heroes": 0.0, "looks": 100.0}
    assert [(record["seed"], record["broken"]) for record in records] == [(7, ["blorf"]), (8, [])]


def test_the_table_says_what_was_missed(capsys):
    print_table({"wish": 94.9, "ended": 95.0, "right answers: name": 12.0})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["94.9", "%", "wanted", "95.0", "%", "missed", "wish"],
        ["95.0", "%", "wanted", "95.0", "%", "met", "ended"],
        ["12.0", "%", "right", "answers:", "name"],
    ]


@pytest.mark.parametrize(("arguments", "said"), [((), "FOLDER [STEP...]"), (("nonsense",), "nonsense is no step")])
def test_the_build_script_refuses(tmp_path, arguments, said):
    words = [str(SCRIPTS / "build"), *([str(tmp_path), *arguments] if arguments else [])]
    environment = {"PYTHON": "/bin/true", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert said in done.stderr


# A stand-in for Python: records what it should run, and makes the files that the build needs.
STAND_IN = """#!/usr/bin/env bash
[ "$1" = -c ] && exit
echo "$2 $3" >>"$LOG"
case $2 in
    storyteller.train) mkdir -p "$OUT/run"; touch "$OUT/run/checkpoint.pt" ;;
    storyteller.export) mkdir -p "$OUT/storyteller-bf16"; touch "$OUT/storyteller-bf16/config.json" ;;
    llmcli) mkdir -p "$OUT/storyteller"; echo '{"evaluation": 1}' >"$OUT/storyteller/quantization.json" ;;
    storyteller.evaluate) touch "$OUT/evaluation.json" ;;
esac
"""


def test_the_build_goes_on_where_it_was(tmp_path):
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {"PYTHON": str(stand_in), "PATH": "/usr/bin:/bin", "LOG": str(log), "OUT": str(tmp_path / "out")}

    def build(*steps):
        log.write_text("")
        subprocess.run([SCRIPTS / "build", tmp_path / "out", *steps], check=True, env=environment)
        return sorted(line.split(" ")[0] for line in log.read_text().splitlines())

    assert build("train", "export") == ["storyteller.data", "storyteller.export", "storyteller.train"]
    assert build("train", "export") == []
    rest = ["train", "export", "quantize", "evaluate", "card"]
    assert build(*rest) == ["llmcli", "storyteller.card", "storyteller.evaluate", "storyteller.held_out"]
    assert build(*rest) == ["storyteller.card"]


def test_stories_are_compared_with_one_another_and_with_the_training_text(monkeypatch, tmp_path):
    told = {"story": "Once Ann found a red key. She sang to the moon all night.", "thing": "key"}
    other = {"story": "Once Bob found a tin zonk. Nobody ever knew what it was.", "thing": "zonk"}
    records = [dict(told), dict(other)]
    assert evaluate.examine_sentences(records) == {"own sentences": 50.0}
    assert records[0]["shared_sentences"] == ["once name found a thing"]
    monkeypatch.setattr(evaluate, "closest_shares", lambda stories, manifest, workers: [0.5, 0.51])
    figures = evaluate.examine_copies(records, tmp_path, 1)
    assert figures == {"no copy": 50.0, "most of a story that one training story has": 51.0}


def test_words_that_are_none_are_found():
    replies = {"The gat": "e opened.", "Dear Quux,": " the gate blorfed Quux.", "a": " gate gate."}

    def teller(prompts, seed):
        return [Reply(replies[prompt], False) for prompt in prompts]

    figures, records = evaluate.examine_words(teller, list(replies), 5, {"the", "gate", "opened"})
    assert [record["strange"] for record in records] == [[], ["blorfed"], []]
    assert figures == {"words": pytest.approx(100 - 100 / 8, abs=0.01), "continuations without a stumble": 66.7}
    assert [record["seed"] for record in records] == [5, 6, 7]


OTHER = {"she": "he", "her": "his", "hers": "his", "herself": "himself", "he": "she", "him": "her", "his": "her",
         "himself": "herself", "it": "she", "its": "her", "they": "he", "their": "his", "them": "him"}  # fmt: skip


def swap_name(random, story):
    return story.text.replace(story.facts["name"], "Rumpeldox")


def swap_pronoun(random, story):
    forms = {"she": "she|her|herself", "he": "he|him|his|himself", "it": "its|itself", "they": "they|them|their"}[
        story.facts["pronoun"]
    ]
    places = list(re.finditer(rf"\b(?:{forms})\b", story.text))
    if not places:  # a short story may have none
        return ""
    match = random.choice(places)
    return story.text[: match.start()] + OTHER.get(match.group(), "she") + story.text[match.end() :]


def repeat_sentence(random, story):
    sentence = random.choice([s for s in sentences_of(story.text) if s.count(" ") >= 4 and s[-1] == "."])
    return story.text + " " + sentence


def cut_end(random, story):
    return story.text[: random.randrange(len(story.text) // 2, len(story.text) - 2)]


def double_word(random, story):
    words = story.text.split(" ")
    places = [at for at, word in enumerate(words) if word.isalpha() and word not in ("had", "that", "Had", "That")]
    at = random.choice(places)
    return " ".join([*words[: at + 1], *words[at:]])


def add_images(random, story):
    return story.text + " He ran like a hare, as quick as a fox, as if he were late, like the wind."


@pytest.fixture(scope="module")
def clean():
    random = Random("clean")
    return [tell(random, "test") for _ in range(200)]


def wish_for(story):
    return Wish(story.facts["name"], story.facts["thing"], story.facts["pronoun"])


def test_clean_stories_pass(clean):
    alarms = [story.shape for story in clean if not all(judge_story(story.text, wish_for(story)).values())]
    assert len(alarms) <= 2, alarms


@pytest.mark.parametrize(
    ("corrupt", "check"),
    [
        (swap_name, "wish"),
        (swap_pronoun, "pronouns"),
        (repeat_sentence, "no repeats"),
        (cut_end, "ended"),
        (double_word, "no stumbles"),
        (add_images, "few images"),
    ],
)
def test_corrupted_stories_are_found(clean, corrupt, check):
    random = Random(5)
    damaged = [(story, text) for story in clean if (text := corrupt(random, story))][:100]
    assert len(damaged) == 100
    found = sum(not judge_story(text, wish_for(story))[check] for story, text in damaged)
    assert found >= 95


def test_wrong_answers_are_found(clean):
    random = Random(6)
    right = wrong = total = 0
    for story, other in zip(clean[:100], clean[100:], strict=True):
        turn, stranger = fact_turns(random, story)[0], fact_turns(random, other)
        same = next((t for t in stranger if t.key == turn.key and t.value != turn.value), stranger[0])
        total += 1
        right += is_right(turn.assistant, turn.value)
        wrong += is_right(same.assistant, turn.value)
    assert right == total
    assert wrong <= 0.05 * total


def test_an_unfinished_story_is_not_ended(clean):
    assert not judge_story(clean[0].text, wish_for(clean[0]), is_finished=False)["ended"]


def test_an_open_pronoun_must_only_be_kept(clean):
    story = next(story for story in clean if story.facts["pronoun"] == "she")
    assert judge_story(story.text, Wish())["pronouns"]
    assert not judge_story(story.text + " He smiled.", Wish())["pronouns"]


def test_masking_hides_names_and_things():
    text = 'Ember lost her red kite. "Then Ember\'s kite," said Bo, "flew off on Monday." Oh no!'
    assert masked_sentences(text, "kite") == ["name lost her thing", "then name thing said name flew off on monday"]
    other = (
        text.replace("Ember", "Zoe").replace("Bo,", "Mr Quill,").replace("red kite", "tin zonk").replace("kite", "zonk")
    )
    assert masked_sentences(other, "zonk") == masked_sentences(text, "kite")


def test_shared_sentences_are_those_of_another_story():
    stories = [["a b c d", "e f g h", "e f g h"], ["a b c d"], ["x y z w"]]
    assert shared_sentences(stories) == [["a b c d"], ["a b c d"], []]


def test_copies_are_found_in_text_told_again(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"seed": 9, "documents": [20, 20]}))
    random = shard_random(9, 1, "train")
    told = [story for _ in range(20) for story in document_with_stories(random, "train")[1]]
    story, thing = told[-1], told[-1].facts["thing"]
    # Another name and another thing do not hide the copy; half a copy is half a copy.
    copied = story.text.replace(story.facts["name"], "Wimblo").replace(thing, "zonk")
    masked = masked_sentences(story.text, thing)
    half = sorted(set(masked))[: len(set(masked)) // 2]
    fresh = [f"nobody said word {i} before" for i in range(len(half))]
    shares = closest_shares([masked, masked_sentences(copied, "zonk"), half + fresh, fresh], manifest)
    assert shares[0] == 1.0
    assert shares[1] > 0.8
    assert shares[2] == pytest.approx(0.5)
    assert shares[3] == 0.0


def test_known_words_are_those_of_training():
    words = training_words(seed=9, num_documents=200)
    assert {"the", "there", "felt", "lived"} <= words
    assert not {"snurk", "photosynthesis"} & words
    assert words_in("Don't stop, Zoë: 3 re-reads!") == ["don", "t", "stop", "zo", "re", "reads"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("She has seen seen it.", ["seen seen"]), ("He had had it, and that that was.", []), ("No, no, no.", [])],
)
def test_stumbles(text, found):
    assert stumbles(text) == found


@pytest.mark.parametrize(
    ("text", "count"),
    [("He ran like a hare, as quick as a fox, as if late.", 3), ("He liked a hare, as well as tea.", 0)],
)
def test_images_are_counted(text, count):
    assert num_images(text) == count


# The gain of drafts for the storyteller: the figures count what happened, and a changed text is an error.


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
