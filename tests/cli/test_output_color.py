"""`--color prob`: the exact bytes on the terminal, which token wrote which text, and when there is no colour."""

import re
import sys

import pytest
from html_tree import luminance
from hypothesis import given, settings
from hypothesis import strategies as st
from inspected_runs import PieceTokenizer, make_events, make_facts, play

from llmcli.cli.output.base import TextOutput
from llmcli.cli.output.tokens import (
    COLORS_16,
    COLORS_256,
    LEVEL_LIMITS,
    RESET,
    TRUE_COLORS,
    ColorOutput,
    level_names,
    likelihood_level,
    terminal_tints,
    why_no_color,
)
from llmcli.cli.terminal import terminal
from llmcli.engine.request import Finished, Timings

FLOWER = "🌼".encode()
WORDS = ["Once", " upon", "\n\n a", " ", "S", "TOP", FLOWER[:1], FLOWER[1:3], FLOWER[3:], "x  y z \n"]
TOKENIZER = PieceTokenizer(WORDS)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def true_color_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(terminal, "is_quiet", False)


def written(capsys, choices, tokenizer=TOKENIZER, **options) -> str:
    play(ColorOutput(make_facts(tokenizer)), make_events(tokenizer, choices, **options))
    return capsys.readouterr().out


def tint(level: int, text: str) -> str:
    return f"\x1b[{TRUE_COLORS[level]}m{text}{RESET}"


@pytest.mark.parametrize(
    ("probability", "level"), [(0.99, 0), (0.51, 0), (0.49, 1), (0.21, 1), (0.19, 2), (0.06, 2), (0.04, 3), (0.002, 4)]
)
def test_each_level_has_its_tint(capsys, probability, level):
    assert written(capsys, [(0, probability)]) == (tint(level, "Once") if level else "Once") + "\n"


def test_white_space_around_words_and_line_breaks_have_no_tint(capsys):
    text = written(capsys, [(1, 0.1), (2, 0.3), (3, 0.001), (9, 0.02)])
    assert text == f" {tint(2, 'upon')}\n\n {tint(1, 'a')} {tint(3, 'x  y z')} \n\n"


def test_text_held_back_keeps_the_tint_of_the_token_that_wrote_it(capsys):
    # "S" waits for what follows it: first a stop string does not come, then it does.
    choices = [(0, 0.3), (4, 0.1), (0, 0.03), (4, 0.1), (5, 0.001)]
    assert written(capsys, choices, stop_strings=("STOP",)) == tint(1, "Once") + tint(2, "S") + tint(3, "Once") + "\n"


def test_a_part_of_a_token_held_back_keeps_its_tint(capsys):
    text = written(capsys, [(9, 0.1), (1, 0.3)], stop_strings=("z \nX",))
    assert text == f"{tint(2, 'x  y')} {tint(2, 'z')} \n {tint(1, 'upon')}\n"


def test_a_stop_string_may_cut_a_token(capsys):
    assert written(capsys, [(9, 0.1)], stop_strings=("y z",)) == f"{tint(2, 'x')}  \n"


def test_a_character_of_several_tokens_is_as_likely_as_all_of_them(capsys):
    assert written(capsys, [(6, 0.6), (7, 0.6), (8, 0.6)]) == tint(1, "🌼") + "\n"  # 0.216
    assert written(capsys, [(6, 0.1), (7, 0.9), (8, 0.9), (0, 0.9)]) == tint(2, "🌼") + "Once\n"


def test_a_character_left_unfinished(capsys):
    assert written(capsys, [(6, 0.3), (7, 0.3)]) == tint(2, "\ufffd") + "\n"


def test_a_special_token_inside_the_text_tints_nothing(capsys):
    tokenizer = PieceTokenizer(WORDS)
    tokenizer.eos_token_ids = frozenset()  # it is still special, but ends nothing
    assert written(capsys, [(0, 0.9), (tokenizer.end_id, 0.001), (0, 0.9)], tokenizer) == "OnceOnce\n"


@pytest.mark.parametrize("choices", [[(1, 0.3), (0, 0.1)], [(3, 0.01), (1, 0.3), (0, 0.1)]])
def test_a_leading_space_that_is_dropped(capsys, choices):
    tokenizer = PieceTokenizer(WORDS, strips_leading_space=True)
    expected = {1: "", 3: " "}[choices[0][0]] + tint(1, "upon") + tint(2, "Once") + "\n"
    assert written(capsys, choices, tokenizer, at_start=True) == expected


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, TOKENIZER.end_id), st.floats(0.001, 0.99)), max_size=8),
    at_start=st.booleans(),
)
def test_without_its_escapes_it_is_the_plain_text_and_every_tint_is_reset(choices, at_start):
    tokenizer = PieceTokenizer(WORDS, strips_leading_space=True)
    tokenizer.eos_token_ids = frozenset()
    events = make_events(tokenizer, choices, stop_strings=("STOP", "Once upon"), at_start=at_start)
    outputs = []
    for form in (TextOutput, ColorOutput):
        with pytest.MonkeyPatch.context() as patch:
            chunks: list[str] = []
            patch.setattr(terminal, "write", lambda text, chunks=chunks, **how: chunks.append(text))
            play(form(make_facts(tokenizer)), events)
            outputs.append(chunks)
    plain, colored = outputs
    assert ESCAPE.sub("", "".join(colored)) == "".join(plain)
    for chunk in colored:
        escapes = ESCAPE.findall(chunk)
        assert escapes[1::2] == [RESET] * (len(escapes) // 2)
        assert RESET not in escapes[::2]
        assert len(escapes) % 2 == 0


def test_samples_stay_one_after_the_other(capsys):
    output = ColorOutput(make_facts(TOKENIZER, samples=2))
    first = make_events(TOKENIZER, [(0, 0.3)])
    second = make_events(TOKENIZER, [(0, 0.03)], sample=1)
    play(output, [*second, *first])
    assert capsys.readouterr().out == f"{tint(1, 'Once')}\n--- sample 2 ---\n{tint(3, 'Once')}\n"


def test_text_beyond_the_tokens_is_not_lost(capsys):
    end = Finished(0, "tail", "tail", (), "length", Timings(0, 0.0, 0.0, 0, 0.0))
    play(ColorOutput(make_facts(TOKENIZER)), [end])
    assert capsys.readouterr().out == "tail\n"


def test_the_legend_is_one_line_on_a_terminal(capsys, monkeypatch):
    ColorOutput(make_facts(TOKENIZER))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ColorOutput(make_facts(TOKENIZER))
    legend = capsys.readouterr().err
    assert ESCAPE.sub("", legend) == "probability of each token: over 50% · 20–50% · 5–20% · 1–5% · under 1%\n"
    assert [tint(level, name) in legend for level, name in enumerate(level_names())] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("is_terminal", "environment", "reason"),
    [
        (True, {}, None),
        (True, {"NO_COLOR": ""}, None),  # empty means not set, by no-color.org
        (False, {}, "stdout is not a terminal"),
        (True, {"NO_COLOR": "1"}, "NO_COLOR is set"),
        (True, {"TERM": "dumb"}, "TERM is dumb"),
    ],
)
def test_why_there_is_no_color(monkeypatch, is_terminal, environment, reason):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer = why_no_color()
    if reason is None:
        assert answer is None
    else:
        assert answer is not None
        assert answer.startswith(f"--color prob: {reason}, ")


@pytest.mark.parametrize(
    ("color_term", "term", "tints"),
    [
        ("truecolor", "xterm", TRUE_COLORS),
        ("24bit", "xterm", TRUE_COLORS),
        ("", "xterm-256color", COLORS_256),
        ("", "xterm", COLORS_16),
    ],
)
def test_as_many_colors_as_the_terminal_has(monkeypatch, color_term, term, tints):
    monkeypatch.setenv("COLORTERM", color_term)
    monkeypatch.setenv("TERM", term)
    assert terminal_tints() == tints


def test_tints_are_legible_on_black_and_on_white():
    steps = [0, 95, 135, 175, 215, 255]  # of the 6 * 6 * 6 colour cube of 256-colour terminals
    for level in range(1, 5):
        red, green, blue = map(int, TRUE_COLORS[level].split(";")[-3:])
        index = int(COLORS_256[level].split(";")[-1]) - 16
        cube = (steps[index // 36], steps[index // 6 % 6], steps[index % 6])
        for color, minimum in (((red, green, blue), 4.5), (cube, 3.6)):
            assert 1.05 / (luminance(*color) + 0.05) >= minimum
            assert (luminance(*color) + 0.05) / 0.05 >= minimum


def test_a_limit_belongs_to_the_likelier_level():
    assert [likelihood_level(limit) for limit in (1, *LEVEL_LIMITS, 0)] == [0, 0, 1, 2, 3, 4]


def test_the_least_likely_are_underlined_too():
    assert all(tints[4].startswith("4;") and not tints[3].startswith("4;") for tints in (TRUE_COLORS, COLORS_256))
