"""Help texts, names of options elsewhere, and the completion of the shell."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from results import Llmcli
from test_docs import options_of, table_rows

from llmcli.cli.command import FOREIGN_COMMANDS, FOREIGN_OPTIONS, refuse_unknown_option
from llmcli.cli.main import COMMANDS, main
from llmcli.errors import UsageError

GROUPS = {"models": ("list", "rm", "alias"), "kernels": ("compare", "profile")}
NAMES = [command.name for command in COMMANDS if command.name not in GROUPS]
CALLS = [
    (),
    *((group,) for group in GROUPS),
    *((group, name) for group, names in GROUPS.items() for name in names),
    *((name,) for name in NAMES),
]
EXPERT = {
    "--xtc-probability",
    "--mirostat-tau",
    "--dry-base",
    "--logit-bias",
    "--sampler-order",
    "--kv-cache",
    "--debug",
}
EVERYDAY = {"--model", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--stop", "--device", "--context"}


def declared(name: str) -> set[str]:
    """Every long option of a command, by its declaration."""
    return {option for option in options_of(name) if option.startswith("--") and "completion" not in option}


def listed(text: str) -> set[str]:
    """The options that have a row."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_help_is_plain_and_fits(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...]) -> None:
    for flag, width in (("--help", 60), ("--help-all", 60), ("--help", 120)):
        monkeypatch.setenv("COLUMNS", str(width))
        result = llmcli(*call, flag)
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= width
        assert not re.search(r"<\w+>|<=|\x1b|2\^|\[/?bold|\\", result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_all_options_are_listed_somewhere(llmcli: Llmcli, name: str) -> None:
    short, full = llmcli(name, "--help").stdout, llmcli(name, "--help-all").stdout
    assert listed(full) - {"--help"} == declared(name)
    assert listed(short) < listed(full) | {"--help-all"}
    num_left_out = len(listed(full) - listed(short))
    assert f"--help-all  Show all options ({num_left_out} more)." in short


@pytest.mark.parametrize("name", ["generate", "chat", "batch"])
def test_everyday_options_come_first(llmcli: Llmcli, name: str) -> None:
    short, full = llmcli(name, "--help").stdout, llmcli(name, "--help-all").stdout
    assert listed(short) >= EVERYDAY
    assert not listed(short) & EXPERT
    assert listed(full) >= EXPERT
    assert short.index("--model") < short.index("--max-new-tokens") < short.index("--temperature")


def test_arguments_and_defaults(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = llmcli("batch", "--help").stdout
    assert text.startswith("Usage: llmcli batch [OPTIONS] IN OUT\n")
    assert "  --temperature X         Randomness: " in text
    assert "[default: the model's, or 0.8]" in " ".join(text.split())
    assert "  -q, --quiet  " in text
    assert "Longest request, in MiB, up to 1024. [default: 8]" in llmcli("serve", "--help-all").stdout
    assert llmcli("generate", "--help").stdout.startswith("Usage: llmcli generate [OPTIONS] [PROMPT]\n")


def test_help_all_behind_the_end_of_options_is_an_argument(llmcli: Llmcli, tiny_llama: object) -> None:
    result = llmcli("tokenize", "-m", tiny_llama, "--", "--help-all")
    assert result.exit_code == 0
    assert "Usage" not in result.stdout


# Options of other programs and misspelt ones: the error names ours, where there is one.


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
def test_an_unknown_option(llmcli: Llmcli, command: str, option: str, meant: str) -> None:
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
def test_what_is_not_near_is_not_proposed(llmcli: Llmcli, command: str, options: str) -> None:
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
            if slip in known or slip in FOREIGN_OPTIONS:
                continue
            with pytest.raises(UsageError) as refusal:
                refuse_unknown_option(slip, known, "nothing")
            assert re.search(rf"(mean|or) {name}( or|\?)", str(refusal.value)), (slip, str(refusal.value))


@pytest.mark.parametrize("arguments", ["--stop --temp Hi", "-- --temp", "--seed 1 -- -ngl"])
def test_values_and_arguments_are_not_options(llmcli: Llmcli, tiny_llama: Path, arguments: str) -> None:
    result = llmcli("generate", "-m", tiny_llama, "--max-new-tokens", "1", "--quiet", *arguments.split())
    assert (result.exit_code, result.stderr) == (0, "")


def test_one_letter_options_still_stand_together(llmcli: Llmcli, tiny_llama: Path) -> None:
    assert llmcli("generate", "Hi", f"-qm{tiny_llama}", "--max-new-tokens", "1").exit_code == 0
    llmcli("generate", "-qz").expect_error(2, "no such option: -z (see llmcli generate --help)")


def test_options_before_the_command(llmcli: Llmcli) -> None:
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
        ("models", "no command given, expected list or rm or alias (see llmcli models --help)"),
        ("generate --seed x", "--seed: expected an integer from 0 to 18446744073709551615 (see llmcli "),
        ("serve --max-body 1G", "--max-body: expected an integer from 1 to 1024 (see llmcli serve --help)"),
        ("serve --max-body 1025", "--max-body: expected at most 1024 (see llmcli serve --help)"),
        ("generate --seed 18446744073709551616", "--seed: expected at most 18446744073709551615"),
        ("generate --temperature x", "--temperature: expected a number (see llmcli generate --help)"),
        ("generate --seed", "--seed needs a value (see llmcli generate --help)"),
        ("generate --chat=3", "--chat takes no value (see llmcli generate --help)"),
        ("generate a b", "unexpected argument: b; did you mean llmcli generate 'a b'? (see llmcli generate --help)"),
        (
            "generate Once upon a",
            "unexpected argument: upon a; did you mean llmcli generate 'Once upon a'? (see llmcli ",
        ),
        ("diff x y a b$", "unexpected argument: b$; did you mean llmcli diff x y 'a b$'? (see llmcli diff --help)"),
        ("pull org/a org/b", "unexpected argument: org/b (see llmcli pull --help)"),
        ("diff a", "missing argument: B (see llmcli diff --help)"),
    ],
)
def test_usage_errors_in_plain_words(llmcli: Llmcli, call: str, message: str) -> None:
    llmcli(*call.split()).expect_error(2, f"error: {message}")


def test_a_prompt_without_a_command(llmcli: Llmcli) -> None:
    told = (
        "no such command: llmcli Once upon a time; did you mean llmcli generate 'Once upon a time'? (see llmcli --help)"
    )
    llmcli("Once upon a time").expect_error(2, told)
    llmcli("models", "Once upon").expect_error(2, "no such command: llmcli models Once upon (see llmcli models --help)")


def test_aliases_lead_to_options_that_exist() -> None:
    known = set().union(
        *(options_of(command.name) for command in COMMANDS if command.name not in ("models", "kernels"))
    )
    for alias, ideas in FOREIGN_OPTIONS.items():
        assert alias not in ideas
        assert alias == alias.replace("_", "-").lower()
        assert ideas
        for idea in ideas:
            assert idea in known or not idea.startswith("-"), alias
    names = {command.name for command in COMMANDS}
    assert not FOREIGN_COMMANDS.keys() & names
    assert {meant.split()[0] for meant in FOREIGN_COMMANDS.values()} <= names


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


# The shell's completion, requested as shells do.


Offered = Callable[[Path, str], list[str]]
ASK = "import sys; from llmcli.__main__ import main; sys.argv[1:] = []; main()"


def question(folder: Path, words: str) -> dict[str, str]:
    """What bash puts into the environment, and where models and presets are."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_LLMCLI_COMPLETE": "complete_bash"}
    return {"HF_HOME": str(folder / "hf"), "LLMCLI_HOME": str(folder / "home"), **asked}


def ask(folder: Path, words: str, *, code: str = ASK, **environment: str) -> subprocess.CompletedProcess[str]:
    """bash's question about the last word of a line; one that ends in a space asks for a new word."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    asked = kept | question(folder, words) | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=asked, capture_output=True, text=True, check=False)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    """The answer of this process, which is quicker than that of a new one."""

    def answer(folder: Path, words: str) -> list[str]:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
            monkeypatch.delenv(name)
        for name, value in question(folder, words).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))  # read when it was imported
        monkeypatch.setattr(sys, "argv", ["llmcli"])
        monkeypatch.chdir(folder)
        exit_code = main()
        said = capsys.readouterr()
        assert (exit_code, said.err) == (0, "")
        return said.out.split()

    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models in the cache, a model folder, another folder, a preset, and three chats."""
    for name in ("models--org--tiny", "models--org--big--one", "datasets--org--text"):
        (tmp_path / "hf" / "hub" / name).mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "home" / "presets").mkdir(parents=True)
    (tmp_path / "home" / "presets" / "strange.toml").write_text("[sampling]\n")
    (tmp_path / "home" / "chat").mkdir()
    for age, name in enumerate(("fox", "my trip", "2026-01-02-über-uns")):
        path = tmp_path / "home" / "chat" / f"{name}.json"
        path.touch()
        os.utime(path, (10**9 - age,) * 2)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("llmcli dif", ["diff"]),
        ("llmcli models ", ["list", "rm", "alias"]),
        ("llmcli generate --preset ", ["precise", "story", "strange"]),
        ("llmcli generate --preset st", ["story", "strange"]),
        ("llmcli generate --device ", ["auto", "cpu", "cuda"]),
        ("llmcli generate --dtype b", ["bfloat16"]),
        ("llmcli generate --kv-cache ", ["auto", "int8"]),
        ("llmcli generate --stats ", ["start"]),
        ("llmcli generate --color ", ["prob"]),
        ("llmcli generate --max-n", ["--max-new-tokens"]),
        ("llmcli serve --max-q", ["--max-queue"]),
        ("llmcli generate --dry-b", ["--dry-base", "--dry-breaker"]),  # of --help-all
        ("llmcli generate --help-", ["--help-all"]),
        ("llmcli generate --file ", []),  # files: the shell's own
        ("llmcli generate --html p", []),
        ("llmcli generate -m ", ["mine", "org/big--one", "org/tiny", "storyteller", "storyteller-bf16"]),
        ("llmcli chat org/t", ["org/tiny"]),
        ("llmcli chat --thinking ", ["show", "fold", "hide"]),
        ("llmcli chat --resume ", ["fox", "2026-01-02-über-uns"]),
        ("llmcli chat --resume f", ["fox"]),
        ("llmcli chat --overflow ", ["drop-oldest", "stop"]),
        ("llmcli eval --against m", ["mine"]),
        ("llmcli plan --card RTX-409", ["RTX-4090"]),
        ("llmcli plan Qwen", ["Qwen2.5-0.5B", "Qwen3-4B"]),
        ("llmcli bench --format ", ["int8", "int4", "awq", "fp8", "bf16"]),
        ("llmcli quantize mi", ["mine"]),
        ("llmcli quantize mine out --group-size ", ["32", "64", "128", "channel"]),
        ("llmcli models rm org/", ["org/big--one", "org/tiny"]),
        ("llmcli pull org/ti", ["org/tiny"]),
        ("llmcli diff mine o", ["org/big--one", "org/tiny"]),
        ("llmcli nonsense --f", []),
    ],
)
def test_values(offered: Offered, folder: Path, words: str, expected: list[str]) -> None:
    assert offered(folder, words) == expected


def test_paths_are_offered_as_they_are_typed(offered: Offered, folder: Path) -> None:
    assert offered(folder, "llmcli ") == [command.name for command in COMMANDS]
    assert offered(folder, f"llmcli chat {folder}/m") == [f"{folder}/mine"]
    assert offered(folder / "other", "llmcli chat ../m") == ["../mine"]


def test_other_shells(folder: Path) -> None:
    asked = {"COMP_WORDS": "", "_TYPER_COMPLETE_ARGS": "llmcli generate --device c"}
    zsh = ask(folder, "", _LLMCLI_COMPLETE="complete_zsh", **asked)
    assert (zsh.stderr, '"cpu"' in zsh.stdout, '"auto"' in zsh.stdout) == ("", True, False)
    fish = ask(folder, "", _LLMCLI_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **asked)
    assert (fish.stderr, fish.stdout.split()) == ("", ["cpu", "cuda"])


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"},  # our error
        {"HF_HOME": "/dev/null/nowhere"},  # the system's
        {"_LLMCLI_COMPLETE": "nonsense"},
        {"COMP_CWORD": "x"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_nothing_is_ever_printed_but_words(folder: Path, environment: dict[str, str]) -> None:
    result = ask(folder, "llmcli generate -m org/", **environment)
    assert result.stderr == ""
    assert "rror" not in result.stdout


def test_nothing_slow_is_imported(folder: Path) -> None:
    code = (
        "import os, sys; from llmcli.cli.main import main\n"
        "for words in ('llmcli plan ', 'llmcli generate --preset ', 'llmcli models rm '):\n"
        "    os.environ |= {'COMP_WORDS': words, 'COMP_CWORD': str(words.count(' '))}\n"
        "    sys.argv[1:] = []\n"
        "    assert main() == 0\n"
        "slow = {'torch', 'numpy', 'tokenizers', 'transformers', 'prompt_toolkit', 'rich.markdown'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    assert ask(folder, "llmcli ", code=code).stdout.endswith("[]\n")
