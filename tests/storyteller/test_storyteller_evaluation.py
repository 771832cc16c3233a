"""The examination of the shipped model: its teller answers as the command line does, its figures match the texts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from storyteller import evaluate, originality, tellers
from storyteller.checkers import Wish
from storyteller.evaluate import examine, held_out_requests, parse, print_table, questions_about_own
from storyteller.held_out import held_out_text
from storyteller.split import is_held_out
from storyteller.tellers import PooledTeller, Reply, Voice, _groups

from llmcli.resources import STORYTELLER, resource_folder
from llmcli.tokenizer.load import load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "storyteller"
FOLDER = resource_folder(STORYTELLER)


def llmcli(*arguments):
    command = [sys.executable, "-m", "llmcli", *map(str, arguments), "--json", "--quiet", "--threads", "1"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_the_teller_answers_as_the_command_line_does():
    with PooledTeller(FOLDER, "story", 1) as teller:
        (reply,) = teller([[{"role": "user", "content": "Hello!"}]], 12)
    answer = llmcli("generate", "--chat", "Hello!", "--seed", 12, "--preset", "story", "--device", "cpu")
    assert (reply.text, reply.is_finished) == (answer["text"], answer["finish_reason"] == "eos")
    assert reply.is_finished


def test_a_question_is_answered_as_in_a_conversation():
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
        return examine(parse(["--stories", "2", "--questions", "2", "--workers", "1", "--prompts", "2", "--quick"]))


def test_figures_are_shares_of_the_verdicts(examination):
    figures, stories = examination["figures"], examination["stories"]
    for check in evaluate.CHECKS:
        assert figures[check] == 100 * sum(record[check] for record in stories) / 2
        assert figures[f"outside the grammar: {check}"] == 100 * examination["outside"][0][check]
    assert figures["right answers"] == 100 * sum(record["right"] for record in examination["answers"]) / 2
    assert len(examination["own_answers"]) == min(2, len(questions_about_own(stories, 1)))
    assert [len(record["text"]) > 20 for record in examination["continuations"]] == [True, True]
    assert [record["seed"] for record in stories] == [1, 2]


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
