"""The file of `--html`: refused before any work, written whole or not at all, and over pages only."""

import errno
import os
from pathlib import Path

import pytest
from inspected_runs import PieceTokenizer, make_events, make_facts, play
from results import Llmcli

from llmcli.cli.output.page import HtmlOutput
from llmcli.cli.output.page_kit import PAGE_MARK
from llmcli.errors import OutputError, UsageError

TOKENIZER = PieceTokenizer(["Once"])
OLD = b"<!DOCTYPE html>" + PAGE_MARK + b"old"


def write_page(path: Path, *, replace: bool = False) -> None:
    play(HtmlOutput(make_facts(TOKENIZER), path, replace=replace), make_events(TOKENIZER, [(0, 0.5)]))


def test_the_page_replaces_an_older_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(OLD)
    output = HtmlOutput(make_facts(TOKENIZER), path, replace=True)
    assert path.read_bytes() == OLD
    seen: list[bytes] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append(path.read_bytes()), replace(*names))[1])
    play(output, make_events(TOKENIZER, [(0, 0.5)]))
    assert seen == [OLD]
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert "Once" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_page_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"page\.html exists; replace it with --force, or name another file"):
        write_page(path)
    assert path.read_bytes() == before
    write_page(path, replace=True)


def test_a_full_disk_leaves_the_older_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(OLD)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = HtmlOutput(make_facts(TOKENIZER), path, replace=True)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=r"page\.html cannot be written: No space left on device"):
        play(output, make_events(TOKENIZER, [(0, 0.5)]))
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_not_a_page_is_refused_at_once_and_stays(tmp_path: Path, replace: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other.html").write_text("<!DOCTYPE html><title>mine</title>")
    (tmp_path / "page.html").write_bytes(OLD)
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    before = sorted((path, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for name, reason in [
        ("missing/page.html", "missing is not a folder"),
        ("file/page.html", "Not a directory"),
        ("folder", "is a folder"),
        ("pipe", "is a device or pipe"),
        ("link", "is a link"),
        ("/dev/null", "is a device or pipe"),
        ("/dev/full", "is a device or pipe"),
        ("file", "exists and is not a page of llmcli"),
        ("other.html", "exists and is not a page of llmcli"),
        ("n" * 300, "File name too long"),
    ]:
        with pytest.raises(UsageError, match=reason) as raised:
            HtmlOutput(make_facts(TOKENIZER), tmp_path / name, replace=replace)
        assert "\n" not in str(raised.value)
    after = sorted((path, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert after == before


def test_refused_before_the_model_is_looked_at(llmcli: Llmcli, tmp_path: Path) -> None:
    path = tmp_path / "notes.html"
    path.write_text("mine")
    flags = ("-m", tmp_path / "none", "--html", path)
    llmcli("generate", "Once", *flags).expect_error(2, "notes.html exists and is not a page of llmcli")
    llmcli("generate", "Once", *flags, "--force").expect_error(2, "notes.html exists and is not a page of llmcli")
    path.write_bytes(OLD)
    llmcli("generate", "Once", *flags).expect_error(2, "notes.html exists; replace it with --force")
    llmcli("generate", "Once", *flags, "--force").expect_error(3, "none does not exist")
    llmcli("generate", "Once", "--force").expect_error(2, "--force needs --html FILE")
