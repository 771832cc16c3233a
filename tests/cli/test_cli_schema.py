"""Commands with a schema: the text, the message for a cut one, receipts, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from results import Llmcli, Result

from llmcli.schema.library import MaskLimits, Matcher
from llmcli.tokenizer.pieces import TokenPieces

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "hero": {"enum": ["Tom", "Lily"]}},
    "required": ["title", "hero"],
    "additionalProperties": False,
}


@pytest.fixture
def generate(llmcli: Llmcli) -> Llmcli:
    """With the built-in model."""
    return lambda *arguments: llmcli("generate", "Once upon a time", "--seed", 1, *arguments)


def test_a_schema_from_a_file_and_from_the_command_line(generate: Llmcli, tmp_path: Path) -> None:
    file = tmp_path / "story.json"
    file.write_text(json.dumps(SCHEMA))
    result = generate("--schema", file)
    assert result.exit_code == 0
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
    assert generate("--schema", json.dumps(SCHEMA)).stdout == result.stdout
    assert "unfinished" not in result.stderr


def test_other_schemas(generate: Llmcli, tmp_path: Path) -> None:
    grammar = tmp_path / "sum.lark"
    grammar.write_text('start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,3}/\n')
    assert re.fullmatch(r"[a-c]{3}-\d+\n", generate("--regex", r"[a-c]{3}-\d+").stdout)
    assert generate("--choice", "yes", "--choice", "no", "--require-complete").stdout in ("yes\n", "no\n")
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})+\n", generate("--grammar", grammar, "--max-new-tokens", 200).stdout)
    json.loads(generate("--json-output").stdout)


def test_a_cut_text(generate: Llmcli) -> None:
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
def test_what_is_refused(generate: Llmcli, arguments: list[str], problem: str) -> None:
    result = generate(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {problem}" in result.stderr


def test_a_file_may_have_the_name_of_a_json_value(
    generate: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("7").write_text('{"const": "from the file"}')
    assert generate("--schema", "7").stdout == '"from the file"\n'


def test_a_byte_order_mark_is_no_text(generate: Llmcli, tmp_path: Path) -> None:
    for option, content in (("--schema", '{"const": 1}'), ("--grammar", 'start: "1"'), ("--grammar", 'root ::= "1"')):
        (tmp_path / "marked").write_text(content, encoding="utf-8-sig")
        assert generate(option, tmp_path / "marked").stdout == "1\n"


@pytest.mark.parametrize(("kind", "draft"), [("--grammar", "auto"), ("--regex", "off")])
def test_a_text_that_never_ends_is_cut(generate: Llmcli, tmp_path: Path, kind: str, draft: str) -> None:
    (tmp_path / "endless.lark").write_text('start: "a" start\n')
    what = tmp_path / "endless.lark" if kind == "--grammar" else "a{1000000}"
    result = generate(kind, what, "--max-new-tokens", 30, "--draft", draft)
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch("a{30,}\n", result.stdout)
    assert "the text is unfinished (length)" in result.stderr


def test_the_bytes_of_tokens_are_kept_for_the_next_start(
    generate: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_schema_is_refused_before_the_model_is_opened(llmcli: Llmcli) -> None:
    result = llmcli("generate", "x", "-m", "missing-folder", "--schema", '{"enum": []}')
    assert result.exit_code == 2
    assert "missing-folder" not in result.stderr


def test_a_grammar_that_gives_up_within_a_text_is_told(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# A schema in `batch`, `chat`, a receipt and its replay: the text of `generate`, and the same message if it is cut.


PROMPT = "Once upon a time"


@pytest.fixture
def batch(llmcli: Llmcli, tmp_path: Path) -> Llmcli:
    """Lines through the built-in model, to standard output."""

    def call(lines: list[dict[str, Any]], *options: object) -> Result:
        (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return llmcli("batch", tmp_path / "in.jsonl", "-", "--ordered", "--seed", 1, *options)

    return call


def test_a_line_says_what_generate_says(llmcli: Llmcli, batch: Llmcli) -> None:
    grammar = 'start: "a" | "b" start'
    held = [{"schema": SCHEMA}, {"regex": "[a-c]{3}"}, {"choice": ["yes", "no"]}, {"json_output": True}]
    lines = [{"prompt": PROMPT, "seed": 1, **one} for one in [*held, {"grammar": grammar}, {}]]
    result = batch(lines, "--rows", 3, "--max-new-tokens", 60)
    assert result.exit_code == 0
    texts = [json.loads(line) for line in result.stdout.splitlines()]
    options = ("--schema", json.dumps(SCHEMA)), ("--regex", "[a-c]{3}"), ("--choice", "yes", "--choice", "no")
    for text, flags in zip(texts, (*options, ("--json-output",)), strict=False):
        alone = llmcli("generate", PROMPT, "--seed", 1, "--max-new-tokens", 60, "--json", *flags)
        assert text["token_ids"] == json.loads(alone.stdout)["token_ids"]
        assert text["is_complete"] == json.loads(alone.stdout)["is_complete"]
    jsonschema.validate(json.loads(texts[0]["text"]), SCHEMA)
    assert set(texts[4]["text"]) <= set("ab")
    assert "is_complete" not in texts[5]


def test_a_line_goes_before_the_option(batch: Llmcli) -> None:
    lines = [{"prompt": PROMPT}, {"prompt": PROMPT, "regex": "[0-9]{4}"}]
    texts = [json.loads(line)["text"] for line in batch(lines, "--choice", "yes").stdout.splitlines()]
    assert texts[0] == "yes"
    assert texts[1].isdecimal()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"schema": {"uniqueItems": True}}, "schema: 'uniqueItems' at # cannot be held exactly"),
        ({"schema": "a"}, "schema is 'a', expected a JSON Schema, an object"),
        ({"choice": "yes"}, "choice is 'yes', expected a list of strings"),
        ({"choice": [""]}, "choice is empty"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be combined"),
        ({"regex": "(?=a)"}, "regex: look-around"),
        ({"regex": "a", "min_new_tokens": 4}, "min_new_tokens is 4, and regex says where a text may end"),
        ({"json_output": 1}, "json_output is 1, expected true or false"),
    ],
)
def test_lines_that_are_refused(batch: Llmcli, line: dict[str, Any], problem: str) -> None:
    result = batch([{"prompt": PROMPT, **line}])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"in.jsonl line 1: {problem}" in result.stderr


def test_lines_that_are_cut(batch: Llmcli) -> None:
    lines = [{"prompt": PROMPT, "regex": "[0-9]{40}", "max_new_tokens": 3}, {"prompt": PROMPT, "choice": ["yes"]}]
    result = batch(lines)
    assert result.exit_code == 0
    assert "1 of 2 texts are unfinished (length): what the schema asks for is not complete" in result.stderr
    assert batch(lines, "--choice", "a", "--require-complete").exit_code == 7


def test_texts_that_an_earlier_run_cut(llmcli: Llmcli, tmp_path: Path) -> None:
    """They count when the batch resumes, and when nothing is left to do; in OpenAI's form too."""
    held = {"max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    lines = [
        {"id": "cut", "prompt": PROMPT, "regex": "[0-9]{40}", "max_new_tokens": 3},
        {"id": "whole", "prompt": PROMPT},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPT, **held}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = ("batch", tmp_path / "in.jsonl", out, "--ordered", "--choice", "yes", "--require-complete")
    said = "2 of 3 texts are unfinished (length)", "error: 2 texts are unfinished; give more room with --max-new-tokens"
    for kept in (None, 3, 2, 1):  # lines that are left of the output
        if kept is not None:
            out.write_text("".join(out.read_text().splitlines(keepends=True)[:kept]))
        result = llmcli(*command)
        assert result.exit_code == 7
        assert all(one in result.stderr for one in said), result.stderr
    assert llmcli(*command[:-1]).exit_code == 0


def test_a_text_that_a_stop_string_cuts_needs_no_room(llmcli: Llmcli) -> None:
    cut = llmcli("generate", PROMPT, "--regex", "abc", "--stop", "b", "--require-complete")
    assert cut.exit_code == 7
    assert "error: a text is unfinished; leave out --stop" in cut.stderr
    cut = llmcli("chat", "--message", "Hi", "--regex", "abc", "--stop", "b", "--require-complete")
    assert "error: an answer is unfinished; leave out --stop" in cut.stderr


def test_another_schema_is_another_batch(llmcli: Llmcli, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    command = ("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--choice")
    assert llmcli(*command, "yes").exit_code == 0
    assert llmcli(*command, "yes").exit_code == 0
    refused = llmcli(*command, "no")
    assert refused.exit_code == 2
    assert "was made with schema" in refused.stderr


def test_chat_answers_fit(llmcli: Llmcli) -> None:
    told = llmcli("chat", "--message", "Hi", "--message", "And?", "--schema", json.dumps(SCHEMA), "--json", "--seed", 3)
    turns = json.loads(told.stdout)["turns"]
    assert len(turns) == 2
    for turn in turns:
        jsonschema.validate(json.loads(turn["answer"]), SCHEMA)
        assert turn["is_complete"] is True
    cut = llmcli("chat", "--message", "Hi", "--regex", "[0-9]{9}", "--max-new-tokens", 2, "--require-complete")
    assert cut.exit_code == 7
    assert "stopped at --max-new-tokens; what the schema asks for is not complete" in cut.stderr


def test_a_receipt_holds_the_schema(llmcli: Llmcli, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    held = ("--schema", json.dumps(SCHEMA), "--max-new-tokens", 40)
    told = llmcli("generate", PROMPT, "--seed", 2, *held, "-n", 2, "--receipt", receipt)
    content = json.loads(receipt.read_text())
    assert (told.exit_code, content["schema"]["name"]) == (0, "--schema")
    assert "llguidance" in content["program"]
    again = llmcli("replay", receipt)
    assert (again.exit_code, again.stdout) == (0, told.stdout)
    assert "Same 2 texts" in again.stderr
    content["schema"] = None
    receipt.write_text(json.dumps(content))
    assert llmcli("replay", receipt).exit_code == 6
