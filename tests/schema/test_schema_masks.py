"""Masks equal brute force: every token is tried, byte by byte, in a vocabulary of bytes."""

import json
from functools import cache

import llguidance
import numpy as np
import pytest
from held_walks import (
    EOS_ID,
    OTHER_EOS_ID,
    SPECIAL_ID,
    VOCAB_SIZE,
    ListedTokenizer,
    allowed_ids,
    awkward_tokenizer,
    awkward_vocabulary,
)  # fmt: skip
from made_schemas import make_regexes, make_schemas

from llmcli.errors import UsageError
from llmcli.sampling.candidates import mask_words, unpack_mask
from llmcli.schema.grammar import Grammar, choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from llmcli.schema.library import MaskLimits, Matcher
from llmcli.schema.schema import ConstrainedText, Schema, Vocabulary

LARK = 'start: sum\nsum: NUMBER (("+" | "-") sum)? | "(" sum ")"\nNUMBER: /[0-9]+/ "."?\n'
NUM_GRAMMARS = 200
BYTES = llguidance.LLTokenizer("byte")


@cache
def grammars() -> list[Grammar]:
    """Made when the first test asks: it takes seconds."""
    made = [
        *(json_schema_grammar("--schema", json.dumps(schema)) for schema in make_schemas(120, seed=1)),
        *(json_schema_grammar("--schema", json.dumps(schema), any_space=True) for schema in make_schemas(16, seed=2)),
        *(regex_grammar("--regex", regex) for regex in make_regexes(60, seed=1)),
        choice_grammar("--choice", ["a", "ab", "abc", "é", "日本", ' "quoted"', "{"]),
        choice_grammar("--choice", [" a", "  ", " ab"]),
        lark_grammar("--grammar", LARK),
        lark_grammar("--grammar", 'start: "é"+ | "日" "本"? | /[^a]/'),
    ]
    assert len(made) == NUM_GRAMMARS
    return made


def brute_force(grammar: Grammar, text: bytes, tokens: list[bytes], ends: set[int]) -> set[int]:
    """The tokens that may follow a text."""
    matcher = llguidance.LLMatcher(BYTES, grammar.lark, log_level=0)
    assert matcher.try_consume_tokens([*text]) == len(text)
    allowed = set(ends) if matcher.is_accepting() else set()
    for token_id, piece in enumerate(tokens):
        if piece and matcher.validate_tokens([*piece]) == len(piece):
            allowed.add(token_id)
    return allowed


@pytest.mark.parametrize("number", range(NUM_GRAMMARS))
def test_a_mask_is_what_trying_every_token_finds(number: int) -> None:
    grammar, tokenizer, vocabulary = grammars()[number], awkward_tokenizer(), awkward_vocabulary()
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    generator, held, text = np.random.default_rng(number), Schema(grammar, vocabulary).begin(at_start=False), b""
    for _ in range(6):
        mask = held.mask()
        assert (mask.dtype, mask.shape) == (np.uint32, (mask_words(VOCAB_SIZE),))
        allowed = allowed_ids(held)
        assert set(allowed.tolist()) == brute_force(grammar, text, tokens, {EOS_ID, OTHER_EOS_ID}), text
        assert (EOS_ID in allowed) == held.is_complete
        following = [int(token_id) for token_id in allowed if token_id not in (EOS_ID, OTHER_EOS_ID)]
        if not following:
            break
        chosen = int(generator.choice(following))
        held.push(chosen)
        text += tokens[chosen]


@pytest.mark.parametrize("number", range(0, NUM_GRAMMARS, 5))
def test_a_first_space_that_is_dropped_is_not_text(number: int) -> None:
    """The first token counts by its visible part, a later one as a whole."""
    grammar, tokenizer = grammars()[number], awkward_tokenizer(strips_leading_space=True)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    seen = [piece.removeprefix(b" ") for piece in tokens]
    schema = Schema(grammar, awkward_vocabulary(strips_leading_space=True))
    held = schema.begin(at_start=True)
    allowed, ends = set(allowed_ids(held).tolist()), {EOS_ID, OTHER_EOS_ID}
    expected = brute_force(grammar, b"", seen, ends)
    expected |= {token_id for token_id, piece in enumerate(tokens) if piece == b" "}
    # Without those whose rest is not a token.
    assert allowed == {one for one in expected if one in ends or seen[one] in tokens or not seen[one]}
    held.push(tokens.index(b" "))
    assert set(allowed_ids(held).tolist()) == brute_force(grammar, b"", tokens, ends)
    if quoted := [token_id for token_id in sorted(allowed) if tokens[token_id].startswith(b" ") and seen[token_id]]:
        held = schema.begin(at_start=True)
        held.push(quoted[0])
        assert set(allowed_ids(held).tolist()) == brute_force(grammar, seen[quoted[0]], tokens, ends)
    assert set(allowed_ids(schema.begin(at_start=False)).tolist()) == brute_force(grammar, b"", tokens, ends)


def test_special_tokens_are_never_text() -> None:
    held = Schema(regex_grammar("--regex", "(?s).*"), awkward_vocabulary()).begin(at_start=False)
    allowed = set(allowed_ids(held).tolist())
    assert SPECIAL_ID not in allowed
    assert {EOS_ID, OTHER_EOS_ID} <= allowed
    assert max(allowed) < awkward_tokenizer().vocab_size  # ids that no token has
    held.push(OTHER_EOS_ID)
    assert held.is_complete


def test_an_end_token_that_is_a_word_is_never_text() -> None:
    vocabulary = Vocabulary(awkward_tokenizer(), [ord("z")], VOCAB_SIZE)
    held = Schema(regex_grammar("--regex", "[x-z]{2}"), vocabulary).begin(at_start=False)
    assert allowed_ids(held).tolist() == [ord("x"), ord("y")]
    held.push(ord("x"))
    held.push(ord("y"))
    assert allowed_ids(held).tolist() == [ord("z")]


def test_a_token_that_is_not_allowed_is_refused() -> None:
    held = Schema(choice_grammar("--choice", ["yes"]), awkward_vocabulary()).begin(at_start=False)
    for token_id in (65, EOS_ID):
        with pytest.raises(ValueError, match=f"does not allow token {token_id}"):
            held.push(token_id)
    for token_id in b"yes":
        held.push(token_id)
    held.push(EOS_ID)
    assert held.is_complete


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    vocabulary = Vocabulary(awkward_tokenizer(), [0], 290)
    assert vocabulary.vocab_size < awkward_tokenizer().vocab_size
    held = Schema(regex_grammar("--regex", "(?s).*"), vocabulary).begin(at_start=False)
    is_allowed = unpack_mask(held.mask())
    assert is_allowed[257:290].any()
    assert not is_allowed[290:].any()
    whole = Schema(regex_grammar("--regex", "(?s).*"), awkward_vocabulary()).begin(at_start=False)
    assert unpack_mask(whole.mask())[1:256].tolist() == is_allowed[1:256].tolist()


def test_texts_of_one_schema_do_not_meet() -> None:
    schema = Schema(choice_grammar("--choice", ["ab", "cd"]), awkward_vocabulary())
    first, second = schema.begin(at_start=False), schema.begin(at_start=False)
    first.push(ord("a"))
    second.push(ord("c"))
    assert ord("b") in allowed_ids(first)
    assert ord("b") not in allowed_ids(second)
    assert ord("a") in allowed_ids(schema.begin(at_start=False))


@pytest.mark.parametrize("number", range(0, NUM_GRAMMARS, 4))
def test_a_text_that_was_looked_ahead_is_where_it_was_told(number: int) -> None:
    """Masks after choices not yet passed to the matcher, alone and of all texts; then these or others are passed."""
    schema, generator = Schema(grammars()[number], awkward_vocabulary()), np.random.default_rng(number)
    texts, told = [schema.begin(at_start=False) for _ in range(3)], [list[int]() for _ in range(3)]

    def plain(token_ids: list[int]) -> ConstrainedText:
        held = schema.begin(at_start=False)
        for token_id in token_ids:
            held.push(token_id)
        return held

    def continued(token_ids: list[int], count: int) -> list[int]:
        chosen: list[int] = []
        for _ in range(count):
            ids = [
                one for one in allowed_ids(plain([*token_ids, *chosen])).tolist() if one not in (EOS_ID, OTHER_EOS_ID)
            ]
            chosen += [int(generator.choice(ids))] if ids else []
        return chosen

    for _ in range(12):
        ahead = [continued(of_text, int(generator.integers(3))) for of_text in told]
        drafts = [
            continued([*before, *chosen], 2) if generator.random() < 0.3 else []
            for before, chosen in zip(told, ahead, strict=True)
        ]
        if generator.random() < 0.6:
            masks = ConstrainedText.masks_of_all(list(zip(texts, ahead, drafts, strict=True)))
        else:
            masks = [held.masks(*wanted) for held, *wanted in zip(texts, ahead, drafts, strict=True)]
        for made, before, chosen, guessed in zip(masks, told, ahead, drafts, strict=True):
            assert not isinstance(made, UsageError)
            for place, mask in enumerate(made):
                assert mask.tolist() == plain([*before, *chosen, *guessed[:place]]).mask().tolist()
        for held, before, chosen in zip(texts, told, ahead, strict=True):
            expected = plain(before)
            if generator.random() < 0.3:
                assert held.is_complete == expected.is_complete
            if generator.random() < 0.3:
                assert held.forced_tokens() == expected.forced_tokens()
            if generator.random() < 0.3:
                assert held.num_fitting(chosen) == len(chosen)
            if generator.random() < 0.3:
                chosen = continued(before, 1)
            for token_id in chosen[:2]:
                held.push(token_id)
                before.append(token_id)
            if generator.random() < 0.3:
                assert held.mask().tolist() == plain(before).mask().tolist()


def test_a_text_that_cannot_go_on_is_told_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks made together: for a text that continues, one that nothing may follow, and one that llguidance gives up.

    Another that it gives up continues with a fresh matcher.
    """
    letters = ListedTokenizer([b"a", b"c", b"</s>"], frozenset({2}))
    vocabulary = Vocabulary(letters, {2}, 3)
    going, dead, lost, last, again = (
        Schema(choice_grammar("--choice", [choice]), vocabulary).begin(at_start=False)
        for choice in ("aca", "ab", "ac", "a", "aca")
    )
    monkeypatch.setattr(lost._matcher, "_fill", lambda *_: lost._matcher.consume(0))
    monkeypatch.setattr(lost, "_fill_anew", lambda _: None)
    monkeypatch.setattr(again._matcher, "_fill", lambda *_, worn=again._matcher: worn.consume(0))
    made = ConstrainedText.masks_of_all([(held, [0], ()) for held in (going, dead, lost, last, again)])
    shown = [str(one) if isinstance(one, UsageError) else one.tolist() for one in made]
    assert shown[:2] == [[[0b010]], "no text fits --choice: this text is not complete, and nothing may follow it"]
    assert str(shown[2]).startswith("--choice is too complex for the rest of this text (")
    assert shown[3:] == [[[0b100]], [[0b010]]]


def test_a_text_at_whose_token_llguidance_gives_up_says_so_with_its_next_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher.__init__, "__defaults__", (MaskLimits(max_items_in_row=2000),))
    grammar = Grammar("--grammar", f'start: s\ns: {"s " * 80}| "x" | ""\n')
    schema = Schema(grammar, awkward_vocabulary())
    held, x = schema.begin(at_start=False), ord("x")
    while held._given_up is None:
        assert x in allowed_ids(held)
        before = len(held._taken)
        held.push(x)
        assert before < 1000
    said = r"--grammar is too complex for the rest of this text \(.*max is 2000.*\); give one with smaller counts"
    with pytest.raises(UsageError, match=said):
        held.mask()
    with pytest.raises(UsageError, match=said):
        schema.behind([x] * (before + 1))
    assert (held.is_complete, held.num_fitting([x]), held.forced_tokens()) == (False, 0, ())
    other, ahead = (schema.begin(at_start=False) for _ in range(2))
    for _ in range(before):
        ahead.push(x)
    other.push(x)
    good, bad, told = ConstrainedText.masks_of_all([(other, [x], ()), (ahead, [x], ()), (held, [x], ())])
    assert not isinstance(good, UsageError)
    assert str(bad) == str(told)
    assert ahead.is_complete  # the token was not passed to it
    with pytest.raises(ValueError, match="the schema does not allow token 121"):
        other.push(ord("y"))
