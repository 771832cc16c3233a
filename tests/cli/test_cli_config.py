"""The user's settings: a default model, aliases, options of commands, and `llmcli config`."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Llmcli

import llmcli as package
from llmcli.cli.completion import complete_model
from llmcli.cli.main import COMMANDS
from llmcli.cli.spelling import near_names
from llmcli.engine.conversation import Conversation, SavedConversation, save_conversation
from llmcli.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "config.md"
ONCE = ("generate", "Once upon a time", "--seed", 1, "--max-new-tokens", 12)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the file of settings."""
    monkeypatch.delenv("LLMCLI_CONFIG")
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def write_file(text: str) -> Path:
        path = tmp_path / "home" / "config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_the_order_of_precedence(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {value: llmcli(*ONCE, "--temperature", value).stdout for value in (0, 2, 3.5)}
    assert len(set(typed.values())) == 3
    write("[generate]\ntemperature = 0\n")
    assert llmcli(*ONCE).stdout == typed[0]
    monkeypatch.setenv("LLMCLI_GENERATE_TEMPERATURE", "3.5")
    assert llmcli(*ONCE).stdout == typed[3.5]
    assert llmcli(*ONCE, "--temperature", 2).stdout == typed[2]
    monkeypatch.setenv("LLMCLI_GENERATE_TEMPERATURE", "hot")
    llmcli(*ONCE).expect_error(2, "--temperature: expected a number", "comes from LLMCLI_GENERATE_TEMPERATURE")


def test_flags_lists_and_integers(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    told = llmcli(*ONCE, "--stop", "a", "--stop", "e", "--json", "--top-k", 2).stdout
    write('[generate]\nstop = ["a", "e"]\njson = true\ntop_k = 2\n')
    answer, expected = json.loads(llmcli(*ONCE).stdout), json.loads(told)
    assert (answer["text"], answer["finish_reason"]) == (expected["text"], "stop")
    monkeypatch.setenv("LLMCLI_GENERATE_JSON", "false")
    assert llmcli(*ONCE).stdout.rstrip("\n") == expected["text"]


def test_the_default_model(llmcli: Llmcli, write: Write, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = llmcli("tokenize", "Hi", "-m", tiny_llama).stdout
    path = write(f'model = "{tiny_llama}"\n')
    said = f"Using {tiny_llama}, the default model of"
    assert llmcli("tokenize", "Hi") == (0, ids, f"{said} {path}\n{len(ids.splitlines())} tokens\n")
    assert "Using" not in llmcli("tokenize", "Hi", "-m", "storyteller").stderr
    monkeypatch.setenv("LLMCLI_MODEL", "storyteller")
    assert llmcli("tokenize", "Hi").stderr.startswith("Using storyteller, the default model of LLMCLI_MODEL\n")
    monkeypatch.setenv("LLMCLI_TOKENIZE_MODEL", str(tiny_llama))
    assert llmcli("tokenize", "Hi").stderr.startswith(f"{said} LLMCLI_TOKENIZE_MODEL\n")


def test_all_take_it(llmcli: Llmcli, write: Write, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(f'model = "tiny"\n[aliases]\nmine = "storyteller"\ntiny = "{tiny_llama}"\n[plan]\nmodel = "mine"\n')
    Path("text.txt").write_text("The quick brown fox")
    for command in (
        "generate Hi --max-new-tokens 2",
        "chat --message Hi --max-new-tokens 2 --chat-template plain",
        "batch text.txt out.jsonl --text --max-new-tokens 2",
        "eval -f text.txt",
        "bench --prompt 8 --depth 8 --tokens 2 --repeats 1",
        "info",
        "plan",
    ):
        result = llmcli(*command.split())
        model = "storyteller" if command == "plan" else tiny_llama
        assert result.exit_code == 0, result.stderr
        assert result.stderr.count(f"Using {model}, the default model of {path}\n") == 1, command

    def refuse(request: object, name: str) -> None:
        raise UsageError(f"opened {name}")

    monkeypatch.setattr("llmcli.cli.serve.open_run", refuse)
    assert f"opened {tiny_llama}" in llmcli("serve", "--port", 0).stderr


def test_a_receipt_and_a_resumed_chat_keep_their_model(llmcli: Llmcli, write: Write, tiny_llama: Path) -> None:
    write("")
    text = llmcli(*ONCE, "--receipt", "receipt.json").stdout
    save_conversation(Path("talk.json"), SavedConversation("storyteller", Conversation()), replace=False)
    write(f'model = "{tiny_llama}"\n[aliases]\nmine = "storyteller"\n')
    assert llmcli("replay", "receipt.json").stdout.strip() == text.strip()
    named = json.loads(llmcli(*ONCE, "-m", "mine", "--json").stdout)
    assert named["model"] == "storyteller"  # what it is, not what it is called here
    resume = ["--chat-template", "plain", "--resume", "talk.json"]
    resumed = llmcli("chat", "--message", "Hi", "--max-new-tokens", 2, *resume)
    assert resumed.stderr.startswith("storyteller: CPU")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("modle = 'a'", "unknown key 'modle'; did you mean model?"),
        ("[generat]", "unknown key 'generat'; did you mean generate?"),
        ("[xyzzy]", "unknown key 'xyzzy'; expected model, aliases or a command"),
        ("generate = 1", "generate is 1, expected a table [generate]"),
        ("[generate]\ntemprature = 1", "[generate] unknown key 'temprature'; did you mean temperature?"),
        ("[generate]\nmax-new-tokens = 1", "[generate] unknown key 'max-new-tokens'; did you mean max_new_tokens?"),
        ("[generate]\ntemperature = '1'", "[generate] temperature is '1', expected a number"),
        ("[generate]\nseed = 1.5", "[generate] seed is 1.5, expected an integer"),
        ("[generate]\njson = 1", "[generate] json is 1, expected true or false"),
        ("[generate]\ndevice = 0", "[generate] device is 0, expected a text in quotes"),
        ("[generate]\nstop = 'a'", "[generate] stop is 'a', expected a list, each a text in quotes"),
        ("model = 3", "model is 3, expected a model folder"),
        ("aliases = 3", "aliases is 3, expected a table [aliases]"),
        ("[aliases]\na = 3", "[aliases] a is 3, expected a model folder or a hub id"),
        ("[aliases]\na = 'a'", "[aliases] a names itself, expected"),
        ("[aliases]\na = 'b'\nb = 'org/b'", "[aliases] a is 'b', expected a model folder or a hub id"),
        ("[aliases]\n'org/a' = 'org/b'", "[aliases] 'org/a' looks like a path or a hub id"),
        ("[aliases]\nstoryteller = 'org/b'", "[aliases] storyteller already means another model"),
        ("[aliases]\n'Llama-2-7B' = 'org/b'", "[aliases] Llama-2-7B already means another model"),
        ("model = ", "is not valid TOML"),
    ],
)
def test_refusals_name_the_file_and_the_key(llmcli: Llmcli, write: Write, text: str, problem: str) -> None:
    path = write(f"{text}\n")
    llmcli(*ONCE).expect_error(2, f"error: {path}", problem)
    told = llmcli("config")
    assert (told.exit_code, told.stderr.count("\n")) == (0, 1)
    assert str(path) in told.stdout
    assert problem in told.stderr
    for arguments in (("--help",), ("--version",), ("generate", "--help"), ("config", "--help")):
        assert llmcli(*arguments)[::2] == (0, "")


def test_what_an_option_itself_refuses(llmcli: Llmcli, write: Write) -> None:
    path = write("[generate]\nseed = -1\n")
    llmcli("generate", "Hi").expect_error(2, "--seed: expected at least 0", f"(--seed comes from {path})")
    path = write('[generate]\ndtype = "float33"\n')
    llmcli("generate", "Hi").expect_error(2, "float33", f"(--dtype comes from {path})")
    assert "comes from" not in llmcli("generate", "Hi", "--dtype", "float34").stderr


def test_an_error_names_the_source_of_a_value(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not name the option; never for a value of the command line."""
    path = write("[generate]\ntemperature = -3\n")
    told = llmcli("generate", "Hi")
    assert told.stderr.endswith(f"error: temperature is -3.0 ({path}), expected a number >= 0\n")
    monkeypatch.setenv("LLMCLI_GENERATE_TEMPERATURE", "-4")
    monkeypatch.setenv("LLMCLI_GENERATE_PRESET", "stori")
    told = llmcli("generate", "Hi")
    assert "preset 'stori' is unknown" in told.stderr
    assert told.stderr.endswith(" (--preset comes from LLMCLI_GENERATE_PRESET)\n")
    told = llmcli("generate", "Hi", "--preset", "story")
    assert told.stderr.endswith("error: temperature is -4.0 (LLMCLI_GENERATE_TEMPERATURE), expected a number >= 0\n")
    flag = llmcli("generate", "Hi", "--preset", "story", "--temperature", -5)
    assert flag.stderr.endswith("error: temperature is -5.0 (flag), expected a number >= 0\n")
    assert "comes from" not in llmcli("generate", "Hi", "--preset", "storia").stderr
    monkeypatch.delenv("LLMCLI_GENERATE_PRESET")
    monkeypatch.setenv("LLMCLI_GENERATE_TEMPERATURE", "0")
    monkeypatch.setenv("LLMCLI_GENERATE_ADAPTER", "none.1 nine")
    told = llmcli("generate", "Hi")
    assert "folder none.1 cannot be read" in told.stderr
    assert told.stderr.endswith(" (--adapter comes from LLMCLI_GENERATE_ADAPTER)\n")


def test_misspelt_variables_are_reported(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("")
    meant = {
        "LLMCLI_GENERATE_TEMPRATURE": "LLMCLI_GENERATE_TEMPERATURE",
        "LLMCLI_GENERAT_TOP_K": "LLMCLI_GENERATE_TOP_K",
        "LLMCLI_MODLE": "LLMCLI_MODEL",
        "LLMCLI_MIN_P": "LLMCLI_GENERATE_MIN_P",
        "LLMCLI_CHAT_CONTXET": "LLMCLI_CHAT_CONTEXT",
        "LLMCLI_KERNELS_BENCH_ROW": "LLMCLI_KERNELS_BENCH_ROWS",
        "LLMCLI_IMAGE": "",
    }
    for name in meant:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("LLMCLI_CHAT_TOP_K", "5")
    monkeypatch.setenv("LLMCLI_GENERATE_MODEL", "storyteller")
    told = llmcli("config")
    assert told.exit_code == 0
    assert len(told.stderr.splitlines()) == len(meant)
    for name, guess in meant.items():
        rest = f"; did you mean {guess}" if guess else "\n"
        assert f"warning: the variable {name} means nothing{rest}" in told.stderr
    own = llmcli(*ONCE, "--quiet")
    assert own.exit_code == 0
    of_others = {"LLMCLI_CHAT_CONTXET", "LLMCLI_KERNELS_BENCH_ROW", "LLMCLI_IMAGE"}
    assert sorted(own.stderr.splitlines()) == sorted(
        f"warning: the variable {name} means nothing; did you mean {meant[name]}?" for name in set(meant) - of_others
    )
    assert "LLMCLI_KERNELS_BENCH_ROWS?" in llmcli("kernels", "bench", "no-such-kernel").stderr
    assert "LLMCLI_KERNELS_BENCH_ROWS?" not in llmcli("kernels", "list").stderr
    names = [command.name for command in COMMANDS]  # or a variable of one would be taken for a misspelt one of another
    assert all(near_names(name, set(names) - {name}) == [] for name in names)


def test_options_of_the_file_do_not_conflict_with_a_server_or_a_merge(llmcli: Llmcli, write: Write) -> None:
    write("[chat]\ncontext = 64\napi_key = 'k'\n[batch]\ntemperature = 0.5\nseed = 3\n")
    server = ("chat", "--server", "http://127.0.0.1:9", "--message", "Hi")
    assert llmcli(*server).exit_code == 4
    llmcli(*server, "--context", 32).expect_error(2, "--context cannot be used with --server")
    assert "--api-key" not in llmcli("chat", "--message", "Hi").stderr
    assert "--temperature" not in llmcli("batch", "merge", "out.jsonl").stderr
    assert "--temperature" in llmcli("batch", "merge", "out.jsonl", "--temperature", 1).stderr


def test_aliases(llmcli: Llmcli, write: Write, tiny_llama: Path, tmp_path: Path) -> None:
    path = write("# kept\n[generate]\ntemperature = 0.5 # warm\n")
    assert llmcli("models", "alias", "qwen2.5", "storyteller").exit_code == 0
    (tmp_path / "here").symlink_to(tiny_llama)
    assert str(path) in llmcli("models", "alias", "tiny", "here").stderr
    assert llmcli("models", "alias").stdout.split() == ["tiny", str(tmp_path / "here"), "qwen2.5", "storyteller"]
    assert llmcli("models", "alias", "tiny", tmp_path / "here").exit_code == 0  # an absolute path, too
    assert path.read_text().startswith("# kept\n[generate]\ntemperature = 0.5 # warm\n")
    assert llmcli("tokenize", "Hi", "-m", "tiny") == llmcli("tokenize", "Hi", "-m", tiny_llama)
    llmcli("tokenize", "Hi", "-m", "tinny").expect_error(3, "there is no model folder tinny; did you mean tiny?")
    llmcli("tokenize", "Hi", "-m", "Storytelle").expect_error(3, "did you mean storyteller?")
    llmcli("plan", "llama-2-7b").expect_error(2, "neither a model folder nor a known shape; did you mean Llama-2-7B?")
    assert llmcli("diff", "tiny", "tiny", "Hi", "--max-new-tokens", 2).exit_code == 0
    assert complete_model("ti") == ["tiny"]
    with package.load("tiny", device="cpu", rows=1) as model:
        assert model.name == tiny_llama.name
    assert llmcli("models", "alias", "tiny", "org/name").exit_code == 0
    assert tomllib.loads(path.read_text())["aliases"] == {"tiny": "org/name", "qwen2.5": "storyteller"}
    llmcli("pull", "qwen2.5").expect_error(2, "'storyteller' is not of the form ORG/NAME")
    (tmp_path / "qwen2.5").mkdir()
    llmcli("tokenize", "Hi", "-m", "qwen2.5").expect_error(3, "qwen2.5")  # the folder here is meant
    assert llmcli("models", "alias", "qwen2.5", "--remove").exit_code == 0
    assert tomllib.loads(path.read_text())["aliases"] == {"tiny": "org/name"}


def test_aliases_that_cannot_be(llmcli: Llmcli, write: Write, tmp_path: Path) -> None:
    path = write('aliases = {a = "org/a"} # on one line\n')
    (tmp_path / "taken").touch()
    for name, model, problem in (
        ("b", "b", "b names itself"),
        ("b", "a", "expected a model folder or a hub id, in quotes, and not an alias"),
        ("b", "nothing", "'nothing' is neither a model folder nor a hub id"),
        ("org/b", "org/a", "looks like a path or a hub id"),
        ("auto", "org/a", "auto already means"),
        ("taken", "org/a", "'taken' is a file or folder here"),
        ("b", "org/b", f"{path} is written in a way that cannot be changed here"),
        ("b", "--remove", "there is no alias 'b'"),
    ):
        llmcli("models", "alias", name, model).expect_error(2, problem)
    llmcli("models", "alias", "b").expect_error(2, "give the model that b stands for, or --remove")


def test_config_says_what_holds_and_from_where(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = llmcli("config").stdout
    assert re.search(r"^file .+ \(not there\)\nmodel +the built-in storyteller \(built-in\)\n$", missing)
    path = write(
        'aliases.mine = "storyteller"\ngenerate.temperature = 0.5\nkernels.bench.rows = 8\nchat.model = "mine"\n'
    )
    monkeypatch.setenv("LLMCLI_MODEL", "org/name")
    monkeypatch.setenv("LLMCLI_BATCH_TOP_K", "7")
    monkeypatch.setenv("LLMCLI_API_KEY", "open sesame")
    monkeypatch.setenv("LLMCLI_CHAT_MODEL", "mine")
    rows = [re.split("  +", line) for line in llmcli("config").stdout.splitlines()]
    assert rows == [
        ["file", str(path)],
        ["model", "org/name (LLMCLI_MODEL)"],
        ["alias mine", f"storyteller ({path})"],
        ["generate --temperature", f"0.5 ({path})"],
        ["chat --model", "storyteller (LLMCLI_CHAT_MODEL)"],
        ["chat --api-key", "(secret) (LLMCLI_API_KEY)"],
        ["batch --top-k", "7 (LLMCLI_BATCH_TOP_K)"],
        ["serve --api-key", "(secret) (LLMCLI_API_KEY)"],
        ["kernels bench --rows", f"8 ({path})"],
    ]
    shown = " ".join(llmcli("chat", "--help-all").stdout.split())
    assert "[default: storyteller, from LLMCLI_CHAT_MODEL]" in shown
    assert "sesame" not in shown
    assert "[default: 0.5, from " in " ".join(llmcli("generate", "--help").stdout.split())


def test_the_file_of_the_guide_is_good(llmcli: Llmcli, write: Write) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    write(text)
    told = llmcli("config")
    assert (told.stderr, told.stdout.count("\n")) == ("", 8)


def test_the_tour_has_its_own_options(llmcli: Llmcli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write('model = "org/name"\n')
    monkeypatch.setenv("LLMCLI_MODEL", "org/name")
    seen: list[str] = []

    def start(_: object, env: dict[str, str], **how: object) -> subprocess.Popen[bytes]:
        seen.extend(name for name in env if name.startswith("LLMCLI_"))
        return real([sys.executable, "-c", ""])

    real = subprocess.Popen
    monkeypatch.setattr("llmcli.cli.tour.subprocess.Popen", start)
    assert llmcli("tour", "--plain").exit_code == 0
    assert set(seen) == {"LLMCLI_CONFIG", "LLMCLI_HOME"}
