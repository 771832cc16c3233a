"""Random tokenizers and chat templates against transformers: `--odd-tokenizers N` runs N of them instead of a few.

The rules that differ on purpose are left out: a BOS that is never doubled or lost (base.py), the space that
Metaspace drops (huggingface.py), runs of spaces with a tokenizer.model, where the ids equal sentencepiece's, and
special tokens that the library finds in normalized text, which it shows and we hide.
"""

import json
import random
import unicodedata
import warnings

import jinja2
import pytest
import transformers
from odd_tokenizers import MESSAGES, random_text, write_folder, write_model_folder, write_old_folder
from transformers import AutoTokenizer

from llmcli.errors import TokenizerError
from llmcli.tokenizer.base import decode
from llmcli.tokenizer.chat_encoding import encode_chat, load_chat_template
from llmcli.tokenizer.load import load_tokenizer

NUM_ALWAYS = 24
NUM_TEXTS = 12
TOOL = {"type": "function", "function": {"name": "é", "parameters": {}}}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("odd_tokenizers") or NUM_ALWAYS))


def test_a_random_tokenizer_equals_transformers(number, tmp_path):
    rng = random.Random(number)
    is_model = number % 5 == 0
    tokens = (write_model_folder if is_model else write_folder)(tmp_path, rng)
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    is_metaspace = not is_model and "Metaspace" in str(reference.backend_tokenizer.decoder)
    added = reference.added_tokens_decoder
    forms = {token_id: reference.convert_ids_to_tokens(token_id) for token_id in tokenizer.special_token_ids}
    shows_special = any(token_id in added and added[token_id].content != form for token_id, form in forms.items())
    for _ in range(NUM_TEXTS):
        text = random_text(rng, tokens)
        if is_model:
            text = " ".join(text.split(" "))
            if "  " in text or text.startswith(" "):
                continue
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        if not is_metaspace and not shows_special:
            shown = reference.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert decode(tokenizer, expected, at_start=True) == shown, text
    compare_templates(reference, tokenizer, tmp_path, rng)


def test_a_random_older_tokenizer_equals_transformers(number, tmp_path):
    rng = random.Random(f"old {number}")
    tokens = write_old_folder(tmp_path, rng)
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    must_add_bos = json.loads((tmp_path / "tokenizer_config.json").read_text()).get("add_bos_token") is True
    template = load_chat_template(tmp_path, tokenizer)
    special = [tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids]
    try:
        for _ in range(NUM_TEXTS):
            text = random_text(rng, tokens)
            plain = reference(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=False) == plain, text
            expected = reference(text)["input_ids"]
            if expected[:2] == [tokenizer.bos_token_id] * 2:  # never doubled
                expected = expected[1:]
            added = reference("")["input_ids"]
            if must_add_bos and added in ([], [*added_at_end(reference)]) and tokenizer.bos_token_id is not None:
                expected = expected if expected[:1] == [tokenizer.bos_token_id] else [tokenizer.bos_token_id, *expected]
            assert tokenizer.encode(text) == expected, text

            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "the fox"}]
            token_ids = encode_chat(tokenizer, template, messages, add_generation_prompt=False)
            said = unicodedata.normalize("NFKC", f"{text} the fox").casefold()
            if reference.bos_token and not any(token.casefold() in said for token in special):
                ids = reference.apply_chat_template(messages, return_dict=False, add_generation_prompt=False)
                assert token_ids == ids, text
            # Only the template's: a message has none, for any text.
            num_special = sum(token_id in tokenizer.special_token_ids for token_id in token_ids)
            assert num_special <= 1 + ("bos_token" in template.special_tokens), text
    finally:
        template.close()


def added_at_end(reference):
    """The ids that its post-processor adds after a text."""
    word = reference("fox", add_special_tokens=False)["input_ids"]
    ids = reference("fox")["input_ids"]
    start = next(index for index in range(len(ids)) if ids[index : index + len(word)] == word)
    return ids[start + len(word) :]


def compare_templates(reference, tokenizer, folder, rng):
    template = load_chat_template(folder, tokenizer)
    variables = {"flag": rng.random() < 0.5, "number": rng.randrange(9), "tools": rng.choice([None, [TOOL]])}
    variables |= {"add_generation_prompt": rng.random() < 0.5, "documents": None}
    messages = MESSAGES[rng.randrange(2) :]
    try:
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, **variables)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(TokenizerError):
                template.render(messages, **variables)
            return
        assert template.render(messages, **variables) == expected
        # Strings of special tokens inside messages are ordinary text here; see chat_encoding.py.
        special = [tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids]
        is_plain = not any(token in str([messages, variables]) for token in special)
        if is_plain and ("  " not in expected or not hasattr(tokenizer, "_processor")):
            ids = reference.apply_chat_template(messages, return_dict=False, **variables)
            assert encode_chat(tokenizer, template, messages, **variables) == ids
    finally:
        template.close()
