"""What commands are made of: their table, groups of options, choices, paths, units, tables and facts."""

from __future__ import annotations

import ast
import gc
import inspect
import io
import json
import re
import textwrap
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from results import Llmcli, Screen

from llmcli import cli
from llmcli.cli.command import OptionEach, argument, option, with_groups
from llmcli.cli.main import COMMANDS, CommandEntry, load_command
from llmcli.cli.run import loaded_objects_set_aside
from llmcli.cli.tables import format_table
from llmcli.cli.terminal import fact_lines
from llmcli.cli.units import divergence, duration, estimated_duration, rate, size
from llmcli.errors import UsageError

MAX_PARAMETERS = 8
MAX_LINES = 60


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_summary_is_the_first_sentence_of_the_help(command: CommandEntry) -> None:
    loaded = load_command(command)
    text = loaded.info.help if isinstance(loaded, typer.Typer) else inspect.getdoc(loaded)
    assert text is not None
    assert text.startswith(command.summary)
    assert command.summary.endswith(".")


@pytest.mark.parametrize("path", sorted(Path(cli.__path__[0]).glob("*.py")), ids=lambda path: path.stem)
def test_no_command_takes_or_does_too_much(path: Path) -> None:
    """Options are in groups, and a command's work is split into named steps."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            num_parameters = len(node.args.args) + len(node.args.kwonlyargs)
            assert num_parameters <= MAX_PARAMETERS, f"{node.name} takes {num_parameters}"
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            assert num_lines <= MAX_LINES, f"{node.name} has {num_lines} lines"


def test_help_lists_every_command_and_has_two_examples(llmcli) -> None:
    text = llmcli("--help").stdout
    for command in COMMANDS:
        assert f" {command.name} " in text
        if command.name not in ("models", "kernels"):  # their subcommands have them
            assert llmcli(command.name, "--help").stdout.count("llmcli ") >= 3  # the usage line and two examples


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_file_without_permission_is_refused_by_who_opens_it(command: CommandEntry) -> None:
    """Typer itself checks whether a path may be read, and refuses with its own message."""
    loaded = load_command(command)
    functions = (
        [entry.callback for entry in loaded.registered_commands] if isinstance(loaded, typer.Typer) else [loaded]
    )
    for function in functions:
        assert callable(function)
        for name, hint in get_type_hints(function, include_extras=True).items():
            kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (None,)
            if kind in (Path, Path | None):
                assert not metadata[0].readable, name


# Groups of options: what a command that takes them offers and receives.


@dataclass(frozen=True)
class Inner:
    size: int = option(3, "How large.", min=1)
    names: list[str] | None = option(None, "Whose.", "--name")


@dataclass(frozen=True)
class Outer:
    color: str = option("red", "Which.", "--colour")
    inner: Inner = Inner()
    is_loud: bool = option(False, "Whether.", "--loud")

    def __post_init__(self) -> None:
        if self.color == "none":
            raise UsageError("there is no such colour")


Weights = Annotated[dict[str, Any], OptionEach({"warm": (float | None, option(None, "How warm."))})]


def run(*arguments: str) -> dict[str, Any]:
    """What the command received."""
    received: dict[str, Any] = {}

    @with_groups
    def paint(
        *, weights: Weights, last: str = option("z", "The last."), outer: Outer, what: str = argument(..., "What.")
    ) -> None:
        """Paint."""
        received.update(weights=weights, last=last, outer=outer, what=what)

    app = typer.Typer()
    app.command()(paint)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return received


def test_defaults() -> None:
    assert run("wall") == {"weights": {"warm": None}, "last": "z", "outer": Outer(), "what": "wall"}


def test_every_field_has_its_option() -> None:
    arguments = "--colour blue --size 5 --name a --name b --loud --warm 0.5 --last y wall"
    outer = Outer("blue", Inner(5, ["a", "b"]), is_loud=True)
    assert run(*arguments.split()) == {"weights": {"warm": 0.5}, "last": "y", "outer": outer, "what": "wall"}


def test_bounds_and_required_arguments_hold() -> None:
    with pytest.raises(typer.TyperException, match="greater than or equal to 1"):
        run("wall", "--size", "0")
    with pytest.raises(typer.TyperException):
        run()


def test_a_group_may_refuse() -> None:
    with pytest.raises(UsageError, match="no such colour"):
        run("wall", "--colour", "none")


def test_options_come_in_the_order_of_parameters_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = capsys.readouterr().out
    places = [text.index(option) for option in ("--warm", "--last", "--colour", "--size", "--name", "--loud")]
    assert places == sorted(places)


# Flags about single choices: logprobs, JSON lines, logit bias, banned ends.


EOS_ID = 257


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path) -> Llmcli:
    return lambda *arguments: llmcli("generate", "Hi", "-m", tiny_llama, "--max-new-tokens", 9, "--seed", 3, *arguments)


def test_json_lines(generate: Llmcli) -> None:
    answer = json.loads(generate("--json", "-n", 2).stdout)
    lines = [json.loads(line) for line in generate("--jsonl", "-n", 2, "--logprobs", 1).stdout.splitlines()]
    run, *rest = lines
    assert (run["type"], run["seed"], run["prompt_token_ids"]) == ("run", 3, [256, *b"Hi"])
    for sample in answer["samples"]:
        mine = [line for line in rest if line["sample"] == sample["sample"]]
        assert [line["type"] for line in mine] == ["token"] * len(sample["token_ids"]) + ["finished"]
        assert [line["token_id"] for line in mine[:-1]] == sample["token_ids"]
        assert "".join(line["text"] for line in mine) == sample["text"]
        assert mine[-1]["finish_reason"] == sample["finish_reason"]
        assert all(len(line["top_logprobs"]) == 1 for line in mine[:-1])


def test_min_new_tokens_and_ignore_eos(generate: Llmcli) -> None:
    """The bias makes the end certain unless it is banned."""
    force = ("--logit-bias", f"{EOS_ID}=1000", "--json")
    assert json.loads(generate(*force).stdout)["token_ids"] == [EOS_ID]
    later = json.loads(generate(*force, "--min-new-tokens", 4).stdout)
    assert later["token_ids"][4:] == [EOS_ID]
    assert EOS_ID not in later["token_ids"][:4]
    never = json.loads(generate(*force, "--ignore-eos").stdout)
    assert (never["finish_reason"], EOS_ID in never["token_ids"]) == ("length", False)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--json", "--jsonl"), ("--json and --jsonl cannot be combined",)),
        (("--logprobs", "3"), ("--logprobs needs --json or --jsonl", "--why")),
        (("--json", "--logprobs", "101"), ("--logprobs: expected at most 100",)),
        (("--logit-bias", "12"), ("--logit-bias is '12', expected a token id, =, and a number",)),
        (("--logit-bias", "a=1"), ("--logit-bias is 'a=1'",)),
        (("--logit-bias", "12=lots"), ("--logit-bias is '12=lots'",)),
        (("--logit-bias", "288=1"), ("names token 288", "has tokens 0 to 287")),
        (("--logit-bias", "-1=1"), ("the logit bias of token -1",)),
        (("--logit-bias", "12=inf"), ("the logit bias of token 12 is inf",)),
        (("--color", "rainbow"), ("--color is 'rainbow', expected prob",)),
        (("--color", "prob", "--json"), ("--color cannot be combined with --json or --jsonl",)),
    ],
)
def test_flags_that_make_no_sense(generate: Llmcli, flags: tuple[str, ...], parts: tuple[str]) -> None:
    generate(*flags).expect_error(2, *parts)


# An empty path is refused by the name of its option: pathlib takes it for the current folder.


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("quantize", "storyteller", ""), "DST"),
        (("convert", "storyteller", "", "--force"), "DST"),
        (("batch", "", "out.jsonl"), "IN"),
        (("batch", "in.jsonl", ""), "OUT"),
        (("replay", ""), "RECEIPT"),
        (("generate", "--file", ""), "--file"),
        (("generate", "-f", ""), "--file"),
        (("generate", "Hi", "--html="), "--html"),
        (("generate", "Hi", "--receipt", ""), "--receipt"),
        (("generate", "Hi", "--grammar", ""), "--grammar"),
        (("generate", "Hi", "--chat", "--chat-template", ""), "--chat-template"),
        (("tokenize", "--file", ""), "--file"),
        (("bench", "--scratch", ""), "--scratch"),
    ],
)
def test_an_empty_path(
    llmcli: Callable[..., Any], command: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = llmcli(*command)
    result.expect_error(2, f"{name} is empty; give it a path")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_empty_text_is_none(llmcli: Callable[..., Any]) -> None:
    assert llmcli("generate", "", "--max-new-tokens", 1, "--seed", 1).exit_code == 0


# Sizes, times, rates and divergences as people read them.


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (6 * 2**20, "6.0 MiB"), (3 * 2**40, "3072.00 GiB")],
)
def test_size(num_bytes: int, expected: str) -> None:
    assert size(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(4.46e-2, "44.6 ms"), (1, "1.0 s"), (98.8, "98.8 s"), (600, "10 min"), (25149.1658, "7.0 h")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.9002, "less than a second"),
        (1.04, "about 1 s"),
        (98.8, "about 99 s"),
        (600, "about 10 min"),
        (25149, "about 7.0 h"),
    ],
)
def test_an_estimate_is_no_finer_than_a_second(seconds: float, expected: str) -> None:
    assert estimated_duration(seconds) == expected


@pytest.mark.parametrize(
    ("nats", "expected"),
    [
        (0, "0"),
        (2.8812e-5, "0.0000288"),
        (0.00972, "0.00972"),
        (0.01, "0.01"),
        (12, "12"),
        (3e-17, "under 0.000001"),
        (-3e-17, "under 0.000001"),
    ],
)
def test_a_divergence_has_no_exponent(nats: float, expected: str) -> None:
    assert divergence(nats) == expected


def test_digits_of_a_divergence() -> None:
    assert divergence(2.8812e-5, digits=2) == "0.000029"


@pytest.mark.parametrize(("per_second", "expected"), [(0.0421, "0.042"), (1, "1.0"), (12345.6, "12,345.6")])
def test_rate(per_second: float, expected: str) -> None:
    assert rate(per_second) == expected


# Tables of figures: plain columns in a pipe; on a terminal whole at every width, in several parts if need be.


HEADER = ("KERNEL", "MATRIX", "LAUNCHES", "SHARED", "LIMITED BY", "GB/s")
ROWS = [
    ("gemv 1", "q_proj k_proj v_proj", "16", "98.6 KiB", "registers", "4,100.3"),
    ("attention_decode", "", "16", "0 bytes", "warps, registers", "0.1"),
    ("漢字", "embed_tokens", "1", "1.2 MiB", "blocks", "12.0"),
]
_COLORS = re.compile(r"\x1b\[[\d;]*m")


def drawn(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setattr("sys.stdout", Screen())
    monkeypatch.setattr("llmcli.cli.tables.columns_of", lambda stream: columns)
    return _COLORS.sub("", format_table(HEADER, ROWS)).splitlines()


def test_a_pipe_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    lines = format_table(HEADER, ROWS).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in (lines[0], lines[1])] == [list(HEADER), list(ROWS[0])]


def test_a_wide_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch, 120)
    assert len(lines) == 2 + len(ROWS)
    assert lines[0].split() == " ".join(HEADER).split()


@pytest.mark.parametrize("columns", range(30, 120, 3))
def test_nothing_is_cut_at_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = drawn(monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert "…" not in text
    for row in (HEADER, *ROWS):
        for cell in row:
            whole = [cell] if re.search(r"\d", cell) else cell.split()
            assert all(re.search(rf"(?<!\S){re.escape(part)}(?!\S)", text) for part in whole), cell


def test_every_part_begins_with_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = "\n".join(drawn(monkeypatch, 40)).split("\n\n")
    assert len(parts) > 1
    for part in parts:
        words = part.split()
        assert words[0] == "KERNEL"
        assert {"attention_decode", "漢字"} <= set(words)


# Lines of a name and a text: whole in a pipe, hanging below their beginning on a terminal.


FACT_ROWS = [("model", "a folder of some name"), ("", "and what it holds: " + "weights " * 12), ("empty", "")]


def test_a_pipe_gets_one_line_each() -> None:
    assert fact_lines(FACT_ROWS, 10, io.StringIO()) == "".join(f"{name:<10}{text}\n" for name, text in FACT_ROWS)


def test_a_terminal_gets_texts_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 40)
    lines = fact_lines(FACT_ROWS, 10, Screen()).splitlines()
    assert lines[0] == "model     a folder of some name"
    expected = textwrap.wrap(FACT_ROWS[1][1].strip(), 30)
    assert [line[10:] for line in lines[1:-1]] == expected
    assert {line[:10] for line in lines[1:-1]} == {" " * 10}
    assert lines[-1].strip() == "empty"


def test_a_very_narrow_terminal_breaks_lines_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.cli.terminal.columns_of", lambda stream: 25)
    assert len(fact_lines(FACT_ROWS, 10, Screen()).splitlines()) == len(FACT_ROWS)


# While many rows run, Python's collector skips what was loaded before; afterwards it checks everything again.


class Ring:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_loaded_is_passed_by_and_no_garbage_is_kept() -> None:
    unused = weakref.ref(Ring())
    loaded = Ring()
    with loaded_objects_set_aside():
        assert unused() is None
        later = weakref.ref(Ring())
        assert all(one is not loaded for one in gc.get_objects())
        gc.collect()
        assert later() is None
    assert any(one is loaded for one in gc.get_objects())


def test_an_interrupt_ends_it() -> None:
    usual = gc.get_threshold()
    with suppress(KeyboardInterrupt), loaded_objects_set_aside():
        assert gc.get_threshold() > usual
        raise KeyboardInterrupt
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, usual)
