"""Damaged tokenizer folders and templates: each is loaded and used, or refused with one line, within 5 s."""

import itertools
import shutil
import time

import pytest
from conftest import CORPUS
from mutations import damaged_folders, small_tokenizers

from llmcli.errors import LLMCliError
from llmcli.tokenizer.chat_encoding import encode_chat, turn_end_token_ids
from llmcli.tokenizer.chat_template import load_chat_template
from llmcli.tokenizer.load import load_tokenizer
from llmcli.tokenizer.stream import decode

TEXTS = ["", "hello <s>wörld\n  a<pad>a 世", "a" * 200 + " <x> <call> \x00"]
MESSAGES = [{"role": "user", "content": "hello </s>"}]
LONGEST_SECONDS = 5
NUM_CASES = 1500
SEED = 20


@pytest.fixture(scope="module")
def documents():
    return small_tokenizers(CORPUS)


def use(folder):
    """Everything that the program does with a tokenizer: whatever escapes is a defect."""
    tokenizer = load_tokenizer(folder)
    template = None
    try:
        for text in TEXTS:
            for parse in (True, False):
                token_ids = tokenizer.encode(text, parse_special_tokens=parse)
                assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)
                decode(tokenizer, token_ids, at_start=True).encode()
        for token_id in (0, 5, tokenizer.vocab_size - 1):
            tokenizer.piece(token_id).encode()
        template = load_chat_template(folder, tokenizer)
        encode_chat(tokenizer, template, MESSAGES)
        turn_end_token_ids(tokenizer, template)
    finally:
        if template is not None:
            template.close()


def test_damaged_folders_are_used_or_refused(documents, spm_model, tmp_path):
    for number, files in enumerate(itertools.islice(damaged_folders(documents, spm_model, SEED), NUM_CASES)):
        folder = tmp_path / "damaged"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        started = time.monotonic()
        try:
            use(folder)
        except LLMCliError as error:
            assert "\n" not in str(error), number
            assert error.exit_code in (2, 3, 4), number
        except BaseException as error:
            raise AssertionError(f"case {number} of seed {SEED}") from error
        assert time.monotonic() - started < LONGEST_SECONDS, number
        shutil.rmtree(folder)
