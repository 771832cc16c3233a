"""Receipts as files: nothing is lost, people can read them, an edit is detected, and other files are refused."""

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from receipt.some_receipt import RECEIPT, changed

from llmcli.errors import UsageError
from llmcli.receipt.receipt import LoadedReceipt, ModelFacts, Receipt, load_receipt, save_receipt

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "receipt.json"
    save_receipt(path, RECEIPT, replace=False)
    return path


def edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_round_trip(path: Path) -> None:
    assert load_receipt(path) == LoadedReceipt(RECEIPT, is_unchanged=True)


def test_people_and_other_programs_can_read_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert '"token_ids": [1, 22, 333]' in text
    assert "Grüße" in text
    assert "\x1b" not in text

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text, parse_constant=refuse)["sampling"]["logit_bias"][0] == [3, "-inf"]


def test_equal_runs_have_equal_files(path: Path, tmp_path: Path) -> None:
    save_receipt(tmp_path / "again.json", RECEIPT, replace=False)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_only_the_owner_can_read_it_and_only_a_receipt_is_replaced(path: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="exists; replace it with --force"):
        save_receipt(path, RECEIPT, replace=False)
    save_receipt(path, changed("runner", threads=3), replace=True)
    other = tmp_path / "notes.json"
    other.write_text("{}")
    with pytest.raises(UsageError, match="exists and is not a receipt of llmcli"):
        save_receipt(other, RECEIPT, replace=True)
    assert other.read_text() == "{}"


def test_a_name_that_is_not_utf8_is_written_as_far_as_it_goes(tmp_path: Path) -> None:
    name = os.fsdecode(b"m\xff")
    path = tmp_path / "receipt.json"
    save_receipt(path, replace(RECEIPT, model=ModelFacts(name, None, RECEIPT.model.files)), replace=False)
    loaded = load_receipt(path)
    assert loaded.is_unchanged
    assert loaded.receipt.model.name == "m?"


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["sampling"].update(seed=4),
        lambda content: content["samples"][0].update(text="five"),
        lambda content: content["program"].update(torch="2.11.1"),
        lambda content: content.pop("sha256"),
        lambda content: content.update(sha256="0" * 64),
        lambda content: content.update(sha256=None),
    ],
)
def test_an_edit_is_seen(path: Path, change: Change) -> None:
    edit(path, change)
    assert not load_receipt(path).is_unchanged


def test_another_layout_of_the_same_content_is_no_edit(path: Path) -> None:
    edit(path, lambda content: None)
    assert load_receipt(path).is_unchanged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("format"), 'it lacks the line "format": "llmcli receipt"'),
        (lambda content: content.update(version=2), "has version 2 of the format, but this llmcli reads version 1"),
        (lambda content: content.update(version=True), "has version True"),
        (lambda content: content.pop("model"), "is not a valid receipt: model is missing"),
        (lambda content: content.update(extra=1), "extra is an unknown key"),
        (lambda content: content["model"].update(name=""), "model.name is '', expected a string, not empty"),
        (lambda content: content["model"].update(name="a\0"), r"model.name is 'a\x00'"),
        (lambda content: content["model"].update(commit="../x"), "model.commit is '../x', expected 40 hexadecimal"),
        (lambda content: content["model"]["files"]["config.json"].update(size=-1), "files.config.json.size is -1"),
        (lambda content: content["machine"].update(card=["x"]), "machine.card is ['x'], expected a string"),
        (lambda content: content["runner"].update(device="cuda:0; rm"), "runner.device is 'cuda:0; rm'"),
        (lambda content: content["runner"].update(threads=10**6), "runner.threads is 1000000, expected an integer"),
        (lambda content: content["prompt"].update(token_ids=[]), "prompt.token_ids is empty"),
        (lambda content: content["prompt"].update(token_ids=[-1]), "prompt.token_ids[0] is -1"),
        (lambda content: content["sampling"].update(seed=2**64), "sampling.seed is 18446744073709551616"),
        (lambda content: content["stopping"].update(stop_strings=[""]), "stopping.stop_strings[0] is ''"),
        (lambda content: content["stopping"].update(max_new_tokens=62), "runner.context is 64, and prompt and new"),
        (lambda content: content.update(samples=[]), "samples holds 0, expected 1 to 10000"),
        (lambda content: content["samples"][1].update(sample=1), "samples holds the same sample twice"),
        (lambda content: content["samples"][1].update(sample=0), "samples[1].sample is 0"),
        (lambda content: content["samples"][0].update(finish_reason="interrupted"), "finish_reason is 'interrupted'"),
    ],
)
def test_what_is_no_receipt_is_refused_in_words(path: Path, change: Change, message: str) -> None:
    edit(path, change)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_receipt(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, message in (("[]", "holds a JSON list"), ("{", "is not valid JSON"), ("\xff", "is not valid JSON")):
        (tmp_path / "x").write_text(content, encoding="latin-1")
        with pytest.raises(UsageError, match=message):
            load_receipt(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file, expected a receipt"):
        load_receipt(tmp_path / "pipe")


def test_a_receipt_without_a_schema_is_as_before_there_were_schemas(tmp_path: Path) -> None:
    save_receipt(path := tmp_path / "receipt.json", RECEIPT, replace=False)
    assert "schema" not in json.loads(path.read_text())
    assert load_receipt(path).receipt == RECEIPT


def test_any_receipt_has_all_keys() -> None:
    """A new field needs a default or a new version of the format; else old files are refused."""
    assert list(Receipt.__dataclass_fields__) == [
        "model", "program", "machine", "runner", "prompt", "sampling", "stopping", "samples", "schema"
    ]  # fmt: skip
