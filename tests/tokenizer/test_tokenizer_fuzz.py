"""Damaged tokenizer folders and templates: each is loaded and used, or refused with one line, within 5 s."""

import itertools
import shutil
import time

import pytest
from conftest import CORPUS
from mutations import damaged_folders, small_tokenizers

from llmcli.errors import LLMCliError
from llmcli.tokenizer.base import decode
from llmcli.tokenizer.chat_encoding import encode_chat, turn_end_token_ids
from llmcli.tokenizer.chat_template import load_chat_template
from llmcli.tokenizer.load import load_tokenizer

TEXTS = ["", "hello <s>wörld\n  a<pad>a 世", "a" * 200 + " <x> <call> \x00"]
MESSAGES = [{"role": "user", "content": "hello </s>"}]
LONGEST_SECONDS = 5
NUM_CASES = 400
SEED = 20


@pytest.fixture(scope="module")
def documents():
    return small_tokenizers(CORPUS)


def use(folder, with_template):
    """Everything that the program does with a tokenizer: any escaping error is a defect."""
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        for parse in (True, False):
            token_ids = tokenizer.encode(text, parse_special_tokens=parse)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)
            decode(tokenizer, token_ids, at_start=True).encode()
    for token_id in (0, 5, tokenizer.vocab_size - 1):
        tokenizer.piece(token_id).encode()
    template = load_chat_template(folder, tokenizer)
    if with_template:  # it takes a process, and most of the time
        try:
            encode_chat(tokenizer, template, MESSAGES)
            turn_end_token_ids(tokenizer, template)
        finally:
            template.close()


def outcome(folder, with_template):
    """None if the folder is usable or properly refused, else what is wrong."""
    started = time.monotonic()
    try:
        use(folder, with_template)
    except LLMCliError as error:
        if "\n" in str(error) or error.exit_code not in (2, 3, 4):
            return f"exit code {error.exit_code}: {error}"
    except BaseException as error:  # a panic is not an Exception
        return repr(error)
    seconds = time.monotonic() - started
    return f"{seconds:.1f} s" if seconds > LONGEST_SECONDS else None


def test_damaged_folders_are_used_or_refused(documents, spm_model, tmp_path):
    wrong = {}
    for number, files in enumerate(itertools.islice(damaged_folders(documents, spm_model, SEED), NUM_CASES)):
        folder = tmp_path / "damaged"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if (reason := outcome(folder, with_template=number % 10 == 0)) is not None:
            wrong[number] = reason
        shutil.rmtree(folder)
    assert wrong == {}
