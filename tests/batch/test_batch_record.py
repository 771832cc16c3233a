"""The record of the settings: kept exactly, and compared setting by setting."""

import json
import math
from pathlib import Path

import pytest

from llmcli.batch.record import (
    Record,
    check_record_path,
    load_record,
    record_path,
    refuse_other_settings,
    save_record,
)
from llmcli.errors import UsageError

SETTINGS = {"temperature": 0.1 + 0.2, "stop": ["a"], "logit_bias": {"5": -math.inf}, "system": None, "text": False}


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record(SETTINGS, 2**64 - 1, "CPU, float32")
    save_record(tmp_path / "out", record)
    assert load_record(tmp_path / "out") == record
    assert [path.name for path in tmp_path.iterdir()] == ["out.run.json"]
    refuse_other_settings(tmp_path / "out", record.settings, {**SETTINGS, "stop": ("a",)})


def test_differences_are_named_with_both_values() -> None:
    new = {**SETTINGS, "temperature": 1.0, "system": "Be kind"}
    with pytest.raises(UsageError) as caught:
        refuse_other_settings(Path("out"), SETTINGS, new)
    assert str(caught.value) == (
        "out was made with temperature 0.30000000000000004, now 1.0; system unset, now 'Be kind': "
        "run with the same settings, or name another output"
    )


def test_of_many_differences_three_are_named() -> None:
    with pytest.raises(UsageError, match="a 1, now 2; b 1, now 2; c 1, now 2; and 2 more differences: "):
        refuse_other_settings(Path("out"), dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "out exists, but out.run.json with its settings is missing; name another output"),
        ("", "is not valid JSON"),
        ("[]", "holds a JSON list, expected an object"),
        ("{}", "is not a record of this version of llmcli batch"),
        ('{"format": "llmcli batch", "version": 2}', "is not a record of this version of llmcli batch"),
        ('{"format": "llmcli batch", "version": 1}', "is damaged: settings, seed or runner is missing"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        record_path(tmp_path / "out").write_text(content)
    with pytest.raises(UsageError, match=message):
        load_record(tmp_path / "out")


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    path = record_path(tmp_path / "out")
    path.write_text(json.dumps({"mine": True}))
    for attempt in (
        lambda: check_record_path(tmp_path / "out"),
        lambda: save_record(tmp_path / "out", Record({}, 1, "")),
    ):
        with pytest.raises(UsageError, match=r"out.run.json exists and is not the record of an llmcli batch"):
            attempt()
    assert json.loads(path.read_text()) == {"mine": True}
