"""Options of other programs and misspelt ones: the error names ours, where there is one."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Result
from test_docs_llama_cpp import options_of, table_rows

from llmcli.cli.commands import COMMANDS
from llmcli.cli.option_names import ALIASES, COMMAND_ALIASES, refuse_unknown_option
from llmcli.errors import UsageError

# llama.cpp's short names on the page that mean something else here, so that no error is possible.
TAKEN = {"-m", "-f", "-n"}


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("generate", "--temp", "did you mean --temperature?"),
        ("generate", "--temp=0.5", "did you mean --temperature?"),
        ("generate", "--ctx-size", "did you mean --context?"),
        ("generate", "-c", "did you mean --context?"),
        ("chat", "-c", "did you mean --context or --continue?"),
        ("chat", "-n", "did you mean --max-new-tokens?"),
        ("batch", "--n-predict", "did you mean --max-new-tokens?"),
        ("generate", "--max_tokens", "did you mean --max-new-tokens?"),
        ("generate", "--max_new_tokens", "did you mean --max-new-tokens?"),
        ("generate", "--top_k", "did you mean --top-k?"),
        ("generate", "--TOP-K", "did you mean --top-k?"),
        ("generate", "--tempreture", "did you mean --temperature?"),
        ("generate", "-ngl", "did you mean --device?"),
        ("tokenize", "-ngl", "a model runs on one device as a whole: see --device"),
        ("generate", "-p", "give the prompt without an option"),
        ("chat", "-p", "did you mean --message?"),
        ("generate", "-i", "see llmcli chat"),
        ("generate", "--gpus", "did you mean --device?"),
        ("generate", "--token", "put the token of your account at the hub into the variable HF_TOKEN"),
        ("info", "--temp", "see llmcli info --help-all"),
        ("generate", "--frobnicate", "see llmcli generate --help-all"),
        ("generate", "-z", "see llmcli generate --help-all"),
    ],
)
def test_an_unknown_option(llmcli: Callable[..., Result], command: str, option: str, meant: str) -> None:
    name = option.partition("=")[0]
    assert llmcli(command, "Hi", option, "1") == (2, "", f"error: no such option: {name}; {meant}\n")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("quantize", "--threads --thread --header --read --metrics"),
        ("generate", "--head --read --trend --repeat --steps --profile --main-gpu --hf-file --log-file --rows --stuff"),
        ("chat", "--limit --lines --alias --props --merge --head --repeat --min-p2x"),
        ("serve", "--sort --trace --export --ssl-key-file --props"),
        ("bench", "--path --batch --watch --load-format"),
        ("plan", "--width --head --load-format"),
        ("info", "--load --model-map --jsonnet"),
        ("batch", "--tests --props --read"),
        ("tour", "--pooling"),
    ],
)
def test_what_is_not_near_is_not_proposed(llmcli: Callable[..., Result], command: str, options: str) -> None:
    for option in options.split():
        refusal = llmcli(command, option)
        assert refusal == (2, "", f"error: no such option: {option}; see llmcli {command} --help-all\n")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "quantize", "bench", "plan", "batch", "eval"])
def test_a_slip_of_the_fingers_is_understood(command: str) -> None:
    """One letter missing, doubled, swapped or wrong after the first of a word, in every option of a command."""
    draw = random.Random(1)
    known = {name for name in options_of(command) if name.startswith("--")}
    for name in sorted(known):
        places = [i for i in range(3, len(name) - 1) if "-" not in name[i - 1 : i + 2]]
        places = [i for i in places if len(name[: i + 1].rpartition("-")[2] + name[i + 1 :].partition("-")[0]) >= 4]
        if not places:
            continue
        at = draw.choice(places)
        swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
        missing, doubled = name[:at] + name[at + 1 :], name[: at + 1] + name[at:]
        for slip in (f"{name[:at]}~{name[at + 1 :]}", missing, doubled, swapped):
            if slip in known or slip in ALIASES:
                continue
            with pytest.raises(UsageError) as refusal:
                refuse_unknown_option(slip, known, "nothing")
            assert re.search(rf"(mean|or) {name}( or|\?)", str(refusal.value)), (slip, str(refusal.value))


@pytest.mark.parametrize("arguments", ["--stop --temp Hi", "-- --temp", "--seed 1 -- -ngl"])
def test_values_and_arguments_are_not_options(llmcli: Callable[..., Result], tiny_llama: Path, arguments: str) -> None:
    result = llmcli("generate", "-m", tiny_llama, "--max-new-tokens", "1", "--quiet", *arguments.split())
    assert (result.exit_code, result.stderr) == (0, "")


def test_one_letter_options_still_stand_together(llmcli: Callable[..., Result], tiny_llama: Path) -> None:
    assert llmcli("generate", "Hi", f"-qm{tiny_llama}", "--max-new-tokens", "1").exit_code == 0
    llmcli("generate", "-qz").expect_error(2, "no such option: -z (see llmcli generate --help)")


def test_options_before_the_command(llmcli: Callable[..., Result]) -> None:
    message = "error: no such option: --seed; options come after the command: llmcli COMMAND --seed\n"
    assert llmcli("--seed", "1", "generate") == (2, "", message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("genrate", "no such command: llmcli genrate; did you mean generate? (see llmcli --help)"),
        ("run", "no such command: llmcli run; did you mean chat? (see llmcli --help)"),
        ("list", "no such command: llmcli list; did you mean models list? (see llmcli --help)"),
        ("models lst", "no such command: llmcli models lst; did you mean list? (see llmcli models --help)"),
        ("frob", "no such command: llmcli frob (see llmcli --help)"),
        ("models", "no command given (see llmcli models --help)"),
        ("generate --seed x", "--seed: expected an integer (see llmcli generate --help)"),
        ("generate --seed 18446744073709551616", "--seed: expected at most 18446744073709551615"),
        ("generate --temperature x", "--temperature: expected a number (see llmcli generate --help)"),
        ("generate --seed", "--seed needs a value (see llmcli generate --help)"),
        ("generate --chat=3", "--chat takes no value (see llmcli generate --help)"),
        ("generate a b", "unexpected argument: b (see llmcli generate --help)"),
        ("diff a", "missing argument: B (see llmcli diff --help)"),
    ],
)
def test_usage_errors_in_plain_words(llmcli: Callable[..., Result], call: str, message: str) -> None:
    llmcli(*call.split()).expect_error(2, f"error: {message}")


def test_aliases_lead_to_options_that_exist() -> None:
    known = set().union(
        *(options_of(command.name) for command in COMMANDS if command.name not in ("models", "kernels"))
    )
    for alias, ideas in ALIASES.items():
        assert alias not in ideas
        assert alias == alias.replace("_", "-").lower()
        assert ideas
        for idea in ideas:
            assert idea in known or not idea.startswith("-"), alias
    names = {command.name for command in COMMANDS}
    assert not COMMAND_ALIASES.keys() & names
    assert {meant.split()[0] for meant in COMMAND_ALIASES.values()} <= names


def test_the_page_on_llama_cpp_says_the_same() -> None:
    """Each of llama.cpp's options there that we lack gives the hint that the page names."""
    known = options_of("generate")
    checked = 0
    for theirs, ours, _ in table_rows():
        named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ours)) & known
        for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", theirs):
            if option in known | TAKEN or not named:
                continue
            with pytest.raises(UsageError) as refusal:
                refuse_unknown_option(option, known, "nothing")
            assert any(name in str(refusal.value) for name in named), (option, str(refusal.value))
            checked += 1
    assert checked > 15
