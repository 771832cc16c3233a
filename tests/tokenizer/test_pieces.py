"""The bytes of a tokenizer's tokens are cached by its content, and the cache is never wrong."""

import random
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from llmcli.resources import token_cache_folder
from llmcli.tokenizer.load import load_tokenizer
from llmcli.tokenizer.pieces import TokenPieces, find_kept_pieces, keep_pieces

WORDS = ["a", "b", "Ġthe", "é", "<s>", "Ċ"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model", WORDS)


def write_tokenizer(folder: Path, words: list[str]) -> Path:
    tokenizer = LibraryTokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def listed(pieces: TokenPieces | None) -> list[bytes] | None:
    return None if pieces is None else [pieces[token_id] for token_id in range(len(pieces))]


def test_pieces_are_what_the_tokenizer_says(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    pieces = TokenPieces.of(tokenizer)
    assert listed(pieces) == [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    assert listed(pieces) == [b"a", b"b", b" the", b"\xe9", b"", b"\n"]
    for count in range(8):
        assert listed(pieces.first(count)) == (listed(pieces) or [])[:count]
    assert pieces.first(3).content == b"ab the"


def test_what_was_kept_is_found_by_content(folder: Path, tmp_path: Path) -> None:
    assert find_kept_pieces(folder) is None
    pieces = TokenPieces.of(load_tokenizer(folder))
    keep_pieces(folder, pieces)
    assert listed(find_kept_pieces(folder)) == listed(pieces)
    same = write_tokenizer(tmp_path / "same", WORDS)
    assert listed(find_kept_pieces(same)) == listed(pieces)
    assert find_kept_pieces(write_tokenizer(tmp_path / "other", [*WORDS, "c"])) is None


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_every_file_of_the_tokenizer_counts(folder: Path, name: str) -> None:
    keep_pieces(folder, TokenPieces.from_list([b"x"]))
    (folder / name).write_text("{}")
    assert find_kept_pieces(folder) is None
    keep_pieces(folder, TokenPieces.from_list([b"y"]))
    (folder / name).write_text("[]")
    assert find_kept_pieces(folder) is None
    (folder / name).unlink()
    assert listed(find_kept_pieces(folder)) == [b"x"]


def test_a_damaged_file_is_not_used_and_written_anew(folder: Path) -> None:
    pieces = TokenPieces.of(load_tokenizer(folder))
    keep_pieces(folder, pieces)
    [kept] = token_cache_folder().iterdir()
    whole, rng = kept.read_bytes(), random.Random(0)
    for _ in range(100):
        place = rng.randrange(len(whole))
        other = bytes([whole[place] ^ 1 << rng.randrange(8)])
        damaged = rng.choice([whole[:place], whole[:place] + other + whole[place + 1 :], whole * 2])
        kept.write_bytes(damaged)
        assert find_kept_pieces(folder) is None
        keep_pieces(folder, pieces)
        assert listed(find_kept_pieces(folder)) == listed(pieces)
    assert [file.name for file in token_cache_folder().iterdir()] == [kept.name]


def test_where_nothing_can_be_kept_nothing_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the folder's place")
    keep_pieces(folder, TokenPieces.of(load_tokenizer(folder)))
    assert find_kept_pieces(folder) is None


def test_pieces_that_others_could_have_written_are_not_used(folder: Path) -> None:
    pieces = TokenPieces.of(load_tokenizer(folder))
    keep_pieces(folder, pieces)
    [kept] = token_cache_folder().iterdir()
    for place in (kept, kept.parent):
        mode = place.stat().st_mode
        place.chmod(0o777)
        assert find_kept_pieces(folder) is None
        place.chmod(mode)
        assert listed(find_kept_pieces(folder)) == listed(pieces)


def test_many_at_once_find_a_whole_file_or_none(folder: Path) -> None:
    pieces = TokenPieces.from_list([bytes([number % 256]) * (number % 50) for number in range(20_000)])
    expected, found = listed(pieces), list[list[bytes] | None]()

    def write() -> None:
        for _ in range(10):
            keep_pieces(folder, pieces)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(listed(find_kept_pieces(folder)))
    assert all(one in (None, expected) for one in found)
    assert found[-1] == expected
    assert len(list(token_cache_folder().iterdir())) == 1
