"""llguidance's C interface gives the results of its Python classes, and lets other threads run."""

import _ctypes
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Sequence

import llguidance
import numpy as np
import pytest
from made_schemas import make_regexes, make_schemas

from llmcli.errors import UsageError
from llmcli.schema import library
from llmcli.schema.grammar import Grammar, choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from llmcli.schema.library import Matcher, Tokens, byte_tokens
from llmcli.tokenizer.pieces import TokenPieces

WORDS = ["", "the", " the", "field", '"', '":', '","', "\n", "é", "日", "\x00", " ", "yes", "no", "aaaa", "aa", "12"]
GRAMMARS = [
    *(json_schema_grammar("--schema", json.dumps(schema)) for schema in make_schemas(40, seed=11)),
    *(regex_grammar("--regex", regex) for regex in make_regexes(20, seed=11)),
    choice_grammar("--choice", ["yes", "no\x00", "日本"]),
]


def make_pieces(seed: int) -> list[bytes]:
    """All bytes, halves of characters, words with several ids, tokens without bytes."""
    rng = random.Random(seed)
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + ["日".encode()[:2], b""]
    pieces += [rng.choice(WORDS).encode() + rng.choice(WORDS).encode() for _ in range(200)]
    return pieces


class Wrapped(llguidance.TokenizerWrapper):
    """A vocabulary as llguidance's own class wants it."""

    def __init__(self, pieces: list[bytes]):
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = len(pieces)
        self.tokens = [*pieces, b""]
        self.special_token_ids = [len(pieces)]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_masks_are_those_of_the_python_classes(number: int) -> None:
    grammar, rng, pieces = GRAMMARS[number], random.Random(number), make_pieces(number)
    tokens = Tokens(TokenPieces.from_list(pieces))
    matcher, mask = Matcher(tokens, grammar.lark), np.zeros(tokens.num_words, np.uint32)
    reference = llguidance.LLMatcher(llguidance.LLTokenizer(Wrapped(pieces), slices=[]), grammar.lark, log_level=0)
    assert not matcher.has_error
    taken: list[int] = []
    for _ in range(30):
        assert matcher.fill_mask(mask)
        allowed = bits(mask)
        assert allowed == bits(np.frombuffer(reference.compute_bitmask(), np.uint32))
        assert matcher.is_accepting == reference.is_accepting() == (tokens.end_id in allowed)
        wanted = [rng.choice(allowed or [0]), *rng.choices(range(len(pieces)), k=2)]
        wanted = [token_id for token_id in wanted if token_id != tokens.end_id]
        assert matcher.num_fitting(wanted) == reference.validate_tokens(wanted)
        following = [token_id for token_id in allowed if token_id != tokens.end_id]
        if rng.random() < 0.2 and taken:
            back = rng.randint(1, len(taken))
            assert matcher.rollback(back)
            assert reference.rollback(back)
            del taken[-back:]
        elif following:
            taken.append(rng.choice(following))
            assert matcher.consume(taken[-1])
            assert reference.consume_token(taken[-1])
    assert tokens.greedy_tokenize(b'the field": 12') == tuple(
        llguidance.LLTokenizer(Wrapped(pieces), slices=[]).greedy_tokenize('the field": 12')
    )


def test_what_does_not_fit_is_an_error_that_a_copy_from_before_has_not() -> None:
    matcher = Matcher(byte_tokens(), GRAMMARS[-1].lark)
    before, mask = matcher.copy(), np.zeros(byte_tokens().num_words, np.uint32)
    assert not matcher.consume(ord("x"))
    assert matcher.has_error
    assert matcher.error
    assert not matcher.fill_mask(mask)
    assert matcher.copy().has_error
    assert (before.has_error, before.error) == (False, "")
    assert before.consume(ord("y"))


def test_a_library_without_the_c_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llguidance._lib.__file__", _ctypes.__file__)
    with pytest.raises(UsageError, match="the installed llguidance has no C function llg_new_tokenizer_v2; install"):
        library._Library()


def test_a_grammar_that_is_not_read_is_an_error() -> None:
    matcher = Matcher(byte_tokens(), "start: nothing")
    assert matcher.has_error
    assert "nothing" in matcher.error


def forced(grammar: Grammar, text: bytes) -> bytes:
    matcher = Matcher(byte_tokens(), grammar.lark)
    for byte in text:
        assert matcher.consume(byte)
    found = matcher.forced_bytes(20)
    assert matcher.forced_bytes(20) == found  # its state is unchanged
    reference = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.lark, log_level=0)
    assert reference.consume_tokens([*text])
    assert reference.compute_ff_bytes()[:20] == found
    return found


def test_forced_bytes_are_those_of_the_python_classes() -> None:
    schema = {"type": "object", "properties": {"field_of_a_name": {"type": "string"}}, "required": ["field_of_a_name"]}
    grammar = json_schema_grammar("--schema", json.dumps({**schema, "additionalProperties": False}))
    assert forced(grammar, b"") == b'{"field_of_a_name":'
    assert forced(grammar, b'{"fi') == b'eld_of_a_name":'
    assert forced(grammar, b'{"field_of_a_name":"') == b""
    assert forced(choice_grammar("--choice", ["yes", "yet", "ye"]), b"") == b"ye"
    assert forced(choice_grammar("--choice", ["yes", "yet", "ye"]), b"ye") == b""  # it may end
    assert forced(choice_grammar("--choice", ["日本"]), b"") == "日本".encode()


@pytest.mark.parametrize(
    "grammar", [lark_grammar("--grammar", 'start: "a" start\n'), regex_grammar("--regex", "a{1000000}")]
)
def test_what_is_forced_without_end_is_looked_at_no_further_than_asked(grammar: Grammar) -> None:
    matcher, begin = Matcher(byte_tokens(), grammar.lark), time.process_time()
    for _ in range(20):
        assert matcher.forced_bytes(20) == b"a" * 20
        assert matcher.consume(ord("a"))
    assert not matcher.has_error
    assert time.process_time() - begin < 0.5  # all of them take 1 s each time


def test_other_threads_go_on_while_tokens_are_made() -> None:
    pieces = TokenPieces.from_list([f"{number:x}".encode() for number in range(200_000)])
    thread = threading.Thread(target=Tokens, args=(pieces,))
    thread.start()
    num_turns, longest, last = 0, 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        num_turns, longest, last = num_turns + 1, max(longest, now - last), now
    assert num_turns > 20


def test_masks_in_threads_are_those_of_one() -> None:
    tokens = Tokens(TokenPieces.from_list(make_pieces(0)))

    def walk(grammar: Grammar, out: list[list[int]]) -> None:
        matcher, mask, rng = Matcher(tokens, grammar.lark), np.zeros(tokens.num_words, np.uint32), random.Random(0)
        for _ in range(20):
            matcher.fill_mask(mask)
            out.append(bits(mask))
            following = [token_id for token_id in out[-1] if token_id != tokens.end_id]
            if not following or not matcher.consume(rng.choice(following)):
                return

    def run(threads: bool) -> Sequence[list[list[int]]]:
        found: list[list[list[int]]] = [[] for _ in GRAMMARS]
        jobs = [threading.Thread(target=walk, args=pair) for pair in zip(GRAMMARS, found, strict=True)]
        for job in jobs:
            job.start()
            if not threads:
                job.join()
        for job in jobs:
            job.join()
        return found

    assert run(threads=True) == run(threads=False)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read as Linux has it")
def test_what_is_no_longer_used_is_given_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1])

    tokens = Tokens(TokenPieces.from_list(make_pieces(0)))
    matcher = Matcher(tokens, GRAMMARS[0].lark)

    def use(count: int) -> None:
        for _ in range(count):
            matcher.copy().consume(ord("{"))
            Tokens(TokenPieces.from_list(make_pieces(1)))
        gc.collect()

    use(20)
    before = resident()
    use(120)
    assert resident() - before < 4000  # pages: 16 MiB; 120 trees take 24 and more
