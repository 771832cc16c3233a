"""`generate` with a schema: the text, the message for a cut one, and refusals."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from results import Result

from llmcli.schema.library import MaskLimits, Matcher
from llmcli.tokenizer.pieces import TokenPieces

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "hero": {"enum": ["Tom", "Lily"]}},
    "required": ["title", "hero"],
    "additionalProperties": False,
}


@pytest.fixture
def generate(llmcli: Callable[..., Result]) -> Callable[..., Result]:
    """With the built-in model."""
    return lambda *arguments: llmcli("generate", "Once upon a time", "--seed", 1, *arguments)


def test_a_schema_from_a_file_and_from_the_command_line(generate: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "story.json"
    file.write_text(json.dumps(SCHEMA))
    result = generate("--schema", file)
    assert result.exit_code == 0
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
    assert generate("--schema", json.dumps(SCHEMA)).stdout == result.stdout
    assert "unfinished" not in result.stderr


def test_samples_differ_and_all_are_valid(generate: Callable[..., Result]) -> None:
    answer = json.loads(generate("--schema", json.dumps(SCHEMA), "-n", 4, "--json").stdout)
    texts = {sample["text"] for sample in answer["samples"]}
    assert len(texts) == 4
    for sample in answer["samples"]:
        jsonschema.validate(json.loads(sample["text"]), SCHEMA)
        assert (sample["finish_reason"], sample["is_complete"]) == ("eos", True)


def test_other_schemas(generate: Callable[..., Result], tmp_path: Path) -> None:
    grammar = tmp_path / "sum.lark"
    grammar.write_text('start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,3}/\n')
    assert re.fullmatch(r"[a-c]{3}-\d+\n", generate("--regex", r"[a-c]{3}-\d+").stdout)
    assert generate("--choice", "yes", "--choice", "no").stdout in ("yes\n", "no\n")
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})+\n", generate("--grammar", grammar, "--max-new-tokens", 200).stdout)
    json.loads(generate("--json-output").stdout)


def test_without_a_schema_nothing_is_said_of_completeness(generate: Callable[..., Result]) -> None:
    assert "is_complete" not in json.loads(generate("--max-new-tokens", 3, "--json").stdout)


def test_a_cut_text(generate: Callable[..., Result]) -> None:
    arguments = ("--schema", json.dumps(SCHEMA), "--max-new-tokens", 8)
    result = generate(*arguments)
    assert result.exit_code == 0
    assert "the text is unfinished (length): what the schema asks for is not complete" in result.stderr
    answer = json.loads(generate(*arguments, "--json").stdout)
    assert (answer["finish_reason"], answer["is_complete"]) == ("length", False)
    lines = [json.loads(line) for line in generate(*arguments, "--jsonl").stdout.splitlines()]
    assert lines[-1]["is_complete"] is False
    strict = generate(*arguments, "--require-complete")
    assert (strict.exit_code, strict.stdout) == (7, result.stdout)
    assert "error: a text is unfinished; give more room with --max-new-tokens or --context" in strict.stderr
    several = generate(*arguments, "-n", 2, "--require-complete")
    assert several.exit_code == 7
    assert "2 of 2 texts are unfinished (length)" in several.stderr


def test_a_whole_text_may_be_required(generate: Callable[..., Result]) -> None:
    assert generate("--choice", "yes", "--require-complete").exit_code == 0


def test_why_and_page_show_the_schema(generate: Callable[..., Result], tmp_path: Path) -> None:
    result = generate("--choice", "yes", "--choice", "no", "--why", "--html", tmp_path / "page.html", "--roads", 1)
    assert result.exit_code == 0
    assert re.search(r"^1 .* schema +[\d.]+%", result.stderr, re.M)
    assert '"schema"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--schema", "{}", "--regex", "a"], "--schema and --regex cannot be combined"),
        (["--require-complete"], "--require-complete needs --schema, --json-output, --regex, --choice or --grammar"),
        (["--regex", "a", "--schema-whitespace"], "--schema-whitespace needs --schema or --json-output"),
        (["--regex", "a", "--schema-strict"], "--schema-strict needs --schema"),
        (["--choice", "a", "--ignore-eos"], "--ignore-eos and --choice cannot be combined: the text could not end"),
        (["--choice", "a", "--min-new-tokens", "3"], "min_new_tokens is 3, and --choice says where a text may end"),
        (["--choice", ""], "--choice is empty; give it a text"),
        (["--schema", "missing.json"], "missing.json cannot be read"),
        (["--schema", ""], "--schema is empty; give it a file or a JSON Schema"),
        (["--schema", " \n"], "--schema is empty; give it a file or a JSON Schema"),
        (["--schema", "[]"], "--schema: # is a JSON list, expected a schema, an object"),
        (["--schema", '"a"'], "--schema: # is a JSON string, expected a schema, an object"),
        (["--schema", " null"], "--schema: # is a JSON null, expected a schema, an object"),
        (["--schema", "7"], "--schema: # is a JSON number, expected a schema, an object"),
        (["--schema", "."], ". is not a regular file, expected a schema"),
        (["--schema", '{"a": '], "--schema is not valid JSON"),
        (["--schema", '{"$ref": "https://example.com/a.json"}'], "--schema: #/$ref is 'https://example.com/a.json'"),
        (["--schema", '{"not": {}}'], "--schema: # cannot be held: Unsatisfiable"),
        (["--grammar", "missing.lark"], "missing.lark cannot be read"),
    ],
)
def test_what_is_refused(generate: Callable[..., Result], arguments: list[str], problem: str) -> None:
    result = generate(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {problem}" in result.stderr


def test_a_file_may_have_the_name_of_a_json_value(
    generate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("7").write_text('{"const": "from the file"}')
    assert generate("--schema", "7").stdout == '"from the file"\n'


def test_a_byte_order_mark_is_no_text(generate: Callable[..., Result], tmp_path: Path) -> None:
    for option, content in (("--schema", '{"const": 1}'), ("--grammar", 'start: "1"'), ("--grammar", 'root ::= "1"')):
        (tmp_path / "marked").write_text(content, encoding="utf-8-sig")
        assert generate(option, tmp_path / "marked").stdout == "1\n"


@pytest.mark.parametrize("draft", ["auto", "ngram", "off"])
@pytest.mark.parametrize("kind", ["--grammar", "--regex"])
def test_a_text_that_never_ends_is_cut(generate: Callable[..., Result], tmp_path: Path, kind: str, draft: str) -> None:
    (tmp_path / "endless.lark").write_text('start: "a" start\n')
    what = tmp_path / "endless.lark" if kind == "--grammar" else "a{1000000}"
    result = generate(kind, what, "--max-new-tokens", 30, "--draft", draft)
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch("a{30,}\n", result.stdout)
    assert "the text is unfinished (length)" in result.stderr


def test_the_bytes_of_tokens_are_kept_for_the_next_start(
    generate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    first = generate("--schema", json.dumps(SCHEMA))
    [kept] = (tmp_path / "tokens").iterdir()
    monkeypatch.setattr(TokenPieces, "of", None)  # the tokenizer is not asked again
    assert generate("--schema", json.dumps(SCHEMA)).stdout == first.stdout
    monkeypatch.undo()
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path))
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    assert generate("--schema", json.dumps(SCHEMA)).stdout == first.stdout
    assert kept.read_bytes() == whole


def test_a_schema_is_refused_before_the_model_is_opened(llmcli: Callable[..., Result]) -> None:
    result = llmcli("generate", "x", "-m", "missing-folder", "--schema", '{"enum": []}')
    assert result.exit_code == 2
    assert "missing-folder" not in result.stderr


def test_the_library_is_imported_only_for_a_schema() -> None:
    program = "import sys; from llmcli.cli.main import run; run(sys.argv[1:]); print('llguidance' in sys.modules)"
    short, held = ["generate", "a", "--max-new-tokens", "1"], ["generate", "a", "--choice", "b"]
    for arguments, is_imported in ((short, "False"), (["generate", "--help"], "False"), (held, "True")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == is_imported, done.stderr


def test_a_grammar_that_gives_up_within_a_text_is_told(
    llmcli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written text stays, and a line says why it ends; in a batch it is the prompt's line."""
    monkeypatch.setattr(Matcher.__init__, "__defaults__", (MaskLimits(max_items_in_row=400),))
    text = f'start: s {"x " * 12}\ns: {"s " * 40}| x | ""\nx: "x"\n'
    (tmp_path / "x.lark").write_text(text)
    result = llmcli("generate", "Once upon a time", "--seed", 3, "--grammar", tmp_path / "x.lark")
    assert result.exit_code == 2
    assert re.fullmatch("x+\n?", result.stdout)
    said = r"is too complex for the rest of this text \(.*\); give one with smaller counts .*"
    assert re.search(rf"^error: {re.escape(str(tmp_path))}/x.lark {said}$", result.stderr, re.M)
    lines = [{"prompt": "Once upon a time", "seed": 3, **one} for one in ({"grammar": text}, {"regex": "[a-c]{3}"})]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = llmcli("batch", tmp_path / "in.jsonl", "-", "--ordered")
    failed, whole = map(json.loads, result.stdout.splitlines())
    assert re.fullmatch(f"grammar {said}", failed["error"]["message"])
    assert re.fullmatch("[a-c]{3}", whole["text"])
    assert result.exit_code == 1
    assert "1 of 2 prompts failed" in result.stderr
