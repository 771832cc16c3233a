"""The incremental decoder against decoding all bytes at once and against the two libraries."""

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli.tokenizer.base import StreamDecoder, decode

NAMES = ["byte_level", "byte_fallback", "metaspace", "spm", "no_fallback", "stories", "llama2", "llama3", "qwen2"]

few_examples = settings(max_examples=60, deadline=None)


def streamed(tokenizer, token_ids, *, at_start):
    decoder = StreamDecoder(tokenizer, at_start=at_start)
    return "".join([decoder.push(token_id) for token_id in token_ids] + [decoder.flush()])


def library_decode(tokenizer_name, request):
    """The library's own decoding, without special tokens."""
    folder = request.getfixturevalue(f"{tokenizer_name}_folder")
    if (folder / "tokenizer.model").exists():
        return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).decode
    reference = request.getfixturevalue("library")(tokenizer_name)
    return lambda token_ids: reference.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_streamed_text_equals_all_bytes_decoded(name, load):
    tokenizer = load(name)
    # Mostly the low ids, where the byte tokens live, so that characters are cut and broken often.
    ids = st.one_of(st.integers(0, 260), st.integers(0, tokenizer.vocab_size + 10))

    @few_examples
    @given(token_ids=st.lists(ids, max_size=30), at_start=st.booleans())
    def check(token_ids, at_start):
        expected = b"".join(tokenizer.token_bytes(i) for i in token_ids).decode("utf-8", errors="replace")
        if at_start and tokenizer.strips_leading_space and expected[:1] == " ":
            expected = expected[1:]
        assert streamed(tokenizer, token_ids, at_start=at_start) == expected
        assert decode(tokenizer, token_ids, at_start=at_start) == expected

    check()


@pytest.mark.parametrize("name", NAMES)
def test_encoded_text_streams_as_the_library_decodes_it(name, load, request):
    tokenizer = load(name)
    reference = library_decode(name, request)

    @few_examples
    @given(text=st.text(max_size=30))
    def check(text):
        token_ids = tokenizer.encode(text)
        assert streamed(tokenizer, token_ids, at_start=True) == reference(token_ids)

    check()


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "spm", "stories", "llama2", "llama3", "qwen2"])
def test_real_scripts_survive(name, load, texts):
    tokenizer = load(name)
    for text in texts:
        token_ids = tokenizer.encode(text, parse_special_tokens=False)
        # SentencePiece's vocabularies write a space as ▁, so a ▁ in the text comes back as a space.
        expected = text.replace("▁", " ") if tokenizer.strips_leading_space else text
        assert streamed(tokenizer, token_ids, at_start=True) == expected


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "spm", "llama2", "llama3"])
def test_continuation_of_a_prompt(name, load):
    tokenizer = load(name)

    @few_examples
    @given(text=st.text(min_size=1, max_size=20), where=st.integers(0, 100))
    def check(text, where):
        token_ids = tokenizer.encode(text)
        cut = where % (len(token_ids) + 1)
        prompt_bytes = b"".join(tokenizer.token_bytes(i) for i in token_ids[:cut])
        try:
            prompt_bytes.decode()
        except UnicodeDecodeError:
            return
        if not prompt_bytes:  # nothing visible yet, so the answer is at the start
            return
        prompt = decode(tokenizer, token_ids[:cut], at_start=True)
        answer = streamed(tokenizer, token_ids[cut:], at_start=False)
        assert prompt + answer == decode(tokenizer, token_ids, at_start=True)

    check()


def test_a_continuation_keeps_its_space_and_a_start_loses_one(load):
    tokenizer = load("byte_fallback")
    hello, space = tokenizer.token_id("▁hello"), tokenizer.token_id("▁▁")
    assert streamed(tokenizer, [hello, hello], at_start=False) == " hello hello"
    assert streamed(tokenizer, [hello, hello], at_start=True) == "hello hello"
    assert streamed(tokenizer, [1, space, hello], at_start=True) == "  hello"  # <s> is not text
    assert streamed(tokenizer, [tokenizer.token_id("h"), hello], at_start=True) == "h hello"
    assert streamed(load("byte_level"), [load("byte_level").token_id("Ġ")], at_start=True) == " "


def test_no_half_characters_come_out(load):
    tokenizer = load("byte_fallback")
    family = "👩‍👩‍👧 🏽世"
    decoder = StreamDecoder(tokenizer, at_start=True)
    parts = [decoder.push(token_id) for token_id in tokenizer.encode(family)]
    assert "�" not in "".join(parts)
    assert "".join(parts) == family
    assert parts.count("") > 10  # the bytes within characters
    assert decoder.flush() == ""


def test_flush_shows_an_incomplete_character(load):
    tokenizer = load("byte_fallback")
    decoder = StreamDecoder(tokenizer, at_start=True)
    assert [decoder.push(tokenizer.token_id(f"<0x{byte:02X}>")) for byte in (0xF0, 0x9F, 0x91)] == ["", "", ""]
    assert decoder.flush() == "�"
    assert decoder.flush() == ""
