"""`--why`: the table on stderr, column by column, and how tokens are written in one line."""

import re
import sys

import numpy as np
import pytest
from inspected_runs import PieceTokenizer, make_events, make_facts, play
from rich.cells import cell_len
from tiny_models import BOS, BOS_ID, write_byte_tokenizer

from llmcli.cli.output.tokens import WhyOutput, percent, show_piece, show_text
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Token
from llmcli.sampling.inspect import inspect_choice
from llmcli.sampling.params import Sampler
from llmcli.tokenizer.load import load_tokenizer

WORDS = ["Once", " upon", "\n", "時間", " a word far too long for its column"]
TOKENIZER = PieceTokenizer(WORDS)


@pytest.fixture(autouse=True)
def wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(terminal, "is_quiet", False)


def token_of(logits: list[float], token_id: int, facts, num_alternatives: int = 5) -> Token:
    sampler = Sampler(facts.sampling.params, seed=7)
    probabilities = np.array(logits, np.float32)
    return Token(0, token_id, "", inspect_choice(probabilities, [], sampler, token_id, num_alternatives))


def table(capsys, facts, tokens: list[Token]) -> str:
    *_, end = make_events(TOKENIZER, [(token.token_id, 0.5) for token in tokens])
    play(WhyOutput(facts), [*tokens, end])
    out, err = capsys.readouterr()
    assert out == ""
    return err


HALVES = np.log([0.4, 0.3, 0.2, 0.06, 0.03, 0.01]).tolist()  # END is the last one


def test_the_whole_table(capsys):
    # Temperature 0.5 squares: 0.16 + 0.09 + 0.04 + 0.0036 + 0.0009 + 0.0001 = 0.2946.
    facts = make_facts(TOKENIZER, temperature=0.5, top_k=4, top_p=0.9)
    assert table(capsys, facts, [token_of(HALVES, 0, facts), token_of(HALVES, 1, facts)]) == (
        "\n"
        "why: 2 tokens; each was drawn from what its last step left\n"
        "#  token  model  step             chance  removed  left  likeliest removed, chance before\n"
        "1  Once   40.0%  temperature 0.5   54.3%              6\n"
        "                 top_k 4           54.5%        2     4  ·a word far too… 0.3%\n"
        "                 top_p 0.9         55.2%        1     3  時間 1.2%\n"
        "2  ·upon  30.0%  temperature 0.5   30.5%              6\n"
        "                 top_k 4           30.7%        2     4  ·a word far too… 0.3%\n"
        "                 top_p 0.9         31.0%        1     3  時間 1.2%\n"
        "                 draw                                    passed over Once 55.2%\n"
    )


def test_a_choice_that_no_step_changed_takes_one_line(capsys):
    facts = make_facts(TOKENIZER)
    assert table(capsys, facts, [token_of(HALVES, 0, facts)]).splitlines()[3:] == [
        "1  Once   40.0%  unchanged   40.0%              6"
    ]


def test_greedy(capsys):
    facts = make_facts(TOKENIZER, temperature=0.0)
    lines = table(capsys, facts, [token_of(HALVES, 0, facts)]).splitlines()
    assert lines[1:] == [
        "why: 1 token; temperature 0 takes the likeliest",
        "#  token  model  step       chance  removed  left  likeliest removed, chance before",
        "1  Once   40.0%  unchanged   40.0%              6",
    ]


def test_columns_line_up_also_under_wide_characters(capsys):
    facts = make_facts(TOKENIZER, top_k=2)
    tokens = [token_of(HALVES, 0, facts), token_of(np.roll(HALVES, 3).tolist(), 3, facts)]
    tokens.append(token_of(np.roll(HALVES, 4).tolist(), 4, facts))
    tokens += [token_of(np.roll(HALVES, 2).tolist(), 2, facts)] * 8
    *_, heading, first, second, third, fourth = table(capsys, facts, tokens).splitlines()[:7]
    begin = cell_len(heading[: heading.index("model")])
    for line in (first, second, third, fourth):
        piece, numbers = line.split("40.0%")
        assert cell_len(piece) == begin
        assert numbers.startswith("  top_k 2   57.1%        4     2  ")
    assert second.startswith(" 2  時間 ")
    assert third.startswith(" 3  ·a word far too…  ")


def test_few_of_the_removed_are_listed_and_those_that_fit(capsys, monkeypatch):
    facts = make_facts(TOKENIZER, top_k=1)
    likely = np.log([0.9, 0.02, 0.02, 0.02, 0.02, 0.02]).tolist()
    four = "·upon 2.0%  ⏎ 2.0%  時間 2.0%  ·a word far too… 2.0%"
    assert table(capsys, facts, [token_of(likely, 0, facts)]).splitlines()[-1].endswith(f"    1  {four}")
    monkeypatch.setenv("COLUMNS", "80")
    line = table(capsys, facts, [token_of(likely, 0, facts)]).splitlines()[-1]
    assert line.endswith(f"    1  {four[:18]}  時間 2.0%")
    assert cell_len(line) <= 80
    monkeypatch.setenv("COLUMNS", "58")  # no room for one: then they are below
    *_, cells, notes = table(capsys, facts, [token_of(likely, 0, facts)]).splitlines()
    assert cells.endswith("    1")
    assert notes == f"   {four}"
    monkeypatch.setenv("COLUMNS", "10")  # too narrow anyway: then the likeliest one
    assert table(capsys, facts, [token_of(likely, 0, facts)]).splitlines()[-1] == "   ·upon 2.0%"


def test_only_the_likeliest_of_unlikely_ones_is_listed(capsys):
    facts = make_facts(TOKENIZER, top_k=1)
    certain = [12.0, 3.0, 2.0, 1.0, 0.0, 0.0]
    assert table(capsys, facts, [token_of(certain, 0, facts)]).splitlines()[-1].endswith("    1  ·upon <0.1%")


def test_samples_that_ended_in_their_order_and_after_the_text(capsys):
    facts = make_facts(TOKENIZER, samples=3)
    output = WhyOutput(facts)
    first, second = (make_events(TOKENIZER, [(0, 0.5)], sample=sample) for sample in (0, 1))
    for event in [*second, *first]:
        output.show(event)
    assert capsys.readouterr() == ("", "")
    output.finish([first[-1], second[-1]])
    assert re.findall(r"why sample \d", capsys.readouterr().err) == ["why sample 1", "why sample 2"]


def test_nothing_generated_nothing_said(capsys):
    WhyOutput(make_facts(TOKENIZER)).finish([])
    play(WhyOutput(make_facts(TOKENIZER)), make_events(TOKENIZER, []))
    assert capsys.readouterr() == ("", "")


def test_it_was_asked_for_so_quiet_does_not_silence_it(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "is_quiet", True)
    facts = make_facts(TOKENIZER)
    assert "Once" in table(capsys, facts, [token_of(HALVES, 0, facts)])


def test_color_on_a_terminal_only_and_the_same_columns(capsys, monkeypatch):
    facts = make_facts(TOKENIZER, top_k=2)
    tokens = [token_of(HALVES, 1, facts)]
    plain = table(capsys, facts, tokens)
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    colored = table(capsys, facts, tokens)
    assert "\x1b[38;5;94m·upon\x1b[0m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert table(capsys, facts, tokens) == plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the", "the"),
        (" the", "·the"),
        ("the  ", "the··"),
        ("two words", "two words"),
        ("two  words", "two··words"),
        ("   ", "···"),
        ("\n\n", "⏎⏎"),
        (" \t\n", "·⇥⏎"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\r", "\\r"),
        ("🌼", "🌼"),
        ("", ""),
    ],
)
def test_text_in_one_printable_line(text, shown):
    assert show_text(text) == shown


def test_pieces_of_a_real_tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    token_ids = (ord("a"), ord(" "), ord("\n"), 0xF0, 0x1B, BOS_ID, 999)
    shown = ["a", "·", "⏎", "\\xf0", "\\x1b", BOS, "[999]"]
    assert [show_piece(tokenizer, token_id) for token_id in token_ids] == shown


@pytest.mark.parametrize(
    ("probability", "text"),
    [
        (0.0, "0.0%"),
        (1e-9, "<0.1%"),
        (0.00099, "<0.1%"),
        (0.001, "0.1%"),
        (0.3424, "34.2%"),
        (0.9994, "99.9%"),
        (0.9996, ">99.9%"),
        (1.0, "100.0%"),
    ],
)
def test_percent(probability, text):
    assert percent(probability) == text
    assert len(text) <= 6
