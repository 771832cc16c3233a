"""The file of `--html`: refused before any work where it cannot be, written whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest
from inspected_runs import PieceTokenizer, make_events, make_facts, play

from llmcli.cli.output.html import HtmlOutput, check_page_path
from llmcli.errors import OutputError, UsageError

TOKENIZER = PieceTokenizer(["Once"])


def test_the_page_replaces_an_older_one_at_once(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    output = HtmlOutput(make_facts(TOKENIZER), path)
    assert path.read_text() == "old"
    seen = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (seen.append(path.read_text()), replace(self, target))[1])
    play(output, make_events(TOKENIZER, [(0, 0.5)]))
    assert seen == ["old"]
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_full_disk_leaves_the_older_page_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    output = HtmlOutput(make_facts(TOKENIZER), path)

    def write_a_little(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_a_little)
    with pytest.raises(OutputError, match=r"page\.html cannot be written: No space left on device"):
        play(output, make_events(TOKENIZER, [(0, 0.5)]))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/page.html", "No such file or directory"),
        ("file/page.html", "Not a directory"),
        ("folder", "it is a folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=f"^--html .* cannot be written: {reason}; name a file") as raised:
        HtmlOutput(make_facts(TOKENIZER), tmp_path / name)
    assert "\n" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_permission(tmp_path, monkeypatch):
    # Root may write anywhere, so the refusal is played.
    def refuse(self: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        check_page_path(tmp_path / "page.html")


def test_a_good_path_is_checked_without_a_trace(tmp_path):
    (tmp_path / "old.html").write_text("old")
    check_page_path(tmp_path / "old.html")
    check_page_path(tmp_path / "new.html")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.html", "old")]


def test_a_pipe_or_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is no ordinary file"):
        HtmlOutput(make_facts(TOKENIZER), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_keeps_being_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "page.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    output = HtmlOutput(make_facts(TOKENIZER), link)
    play(output, make_events(TOKENIZER, [(0, 0.5)]))
    assert link.is_symlink()
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link.html", "page.html"]
