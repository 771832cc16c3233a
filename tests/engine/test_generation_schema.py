"""Texts with a schema, on a model: they do not depend on how they run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from scripted_drafts import ScriptedSource
from simulated_card import simulate
from tiny_models import BOS_ID, EOS_ID, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.draft_sources import NgramSource
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Event, Failed, Finished, KeptRow, Request, Token
from llmcli.engine.scheduler import Generation, Scheduler
from llmcli.errors import UsageError
from llmcli.runners.base import Runner
from llmcli.runners.cuda.load.model import load as load_on_card
from llmcli.runners.numpy.load import load
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.schema.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from llmcli.schema.library import MaskLimits, Matcher
from llmcli.schema.schema import ConstrainedText, Schema, Vocabulary
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "hero": {"enum": ["Tom", "Lily", "Änne"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 150}, "maxItems": 3},
    },
    "required": ["title", "hero", "ages"],
    "additionalProperties": False,
}
WARM = Sampler(SamplingParams(temperature=1.5), seed=3, num_prompt_tokens=2, eos_token_ids=frozenset({EOS_ID}))


class Model:
    """A tiny random model, whose tokens are bytes, on the CPU or on a card that numpy simulates.

    A card works ahead: a choice is read once the next step is queued.
    """

    def __init__(self, folder: Path, card: Any):
        self.folder = folder
        self.card = card
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.vocabulary = Vocabulary(self.tokenizer, {EOS_ID}, 288)
        self.schema = Schema(json_schema_grammar("--schema", json.dumps(SCHEMA)), self.vocabulary)

    def load(self, num_rows: int = 1, **limits: int) -> Runner:
        model, sizes = open_model(self.folder), {"max_seq_len": 320, "num_rows": num_rows}
        if self.card is None:
            device = load(model, **sizes)._device
        else:
            device = load_on_card(model, **sizes, device=self.card, uses_graphs=False)._device
        device.limits = replace(device.limits, **limits)
        return SteppingRunner(device)

    def request(self, **changes: object) -> Request:
        return replace(Request((BOS_ID, 65), WARM, (0,), None, schema=self.schema), **changes)  # type: ignore[arg-type]

    def texts(self, runner: Runner, request: Request) -> dict[int, Finished]:
        events = Generation(runner, self.tokenizer, request).events()
        return {event.sample: event for event in events if isinstance(event, Finished)}


@pytest.fixture(scope="module", params=["CPU", "card"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        card = simulate(monkeypatch) if request.param == "card" else None
        yield Model(write_tiny_llama(tmp_path_factory.mktemp("held") / "model"), card)


def test_finished_texts_are_valid(model: Model) -> None:
    for finished in model.texts(model.load(4), model.request(samples=tuple(range(6)))).values():
        assert (finished.finish_reason, finished.is_complete) == ("eos", True)
        jsonschema.validate(json.loads(finished.text), SCHEMA)


@pytest.mark.parametrize("at_start", [False, True])
def test_a_text_stands_alone_for_its_schema_too(model: Model, monkeypatch: pytest.MonkeyPatch, at_start: bool) -> None:
    begun: list[bool] = []
    begin = Schema.begin

    def noted(schema: Schema, *, at_start: bool) -> ConstrainedText:
        begun.append(at_start)
        return begin(schema, at_start=at_start)

    monkeypatch.setattr(Schema, "begin", noted)
    model.texts(model.load(), model.request(at_start=at_start, max_new_tokens=1))
    assert begun == [at_start]


def test_a_sample_is_the_same_alone(model: Model) -> None:
    together, alone = model.texts(model.load(4), model.request(samples=tuple(range(3)))), model.load()
    for index, finished in together.items():
        assert model.texts(alone, model.request(samples=(index,)))[index].token_ids == finished.token_ids


def test_a_text_that_gave_its_pages_back_goes_on_in_its_schema(model: Model) -> None:
    requests = [model.request(samples=(index,)) for index in range(4)]
    scheduler, texts = Scheduler(model.load(4, num_pages=10), model.tokenizer), {}
    for request in requests:
        scheduler.submit(request)
    while not scheduler.is_idle:
        texts |= {event.sample: event for event in scheduler.step() if isinstance(event, Finished)}
    assert scheduler.usage.preemptions > 0
    alone = model.load()
    for index, request in enumerate(requests):
        assert texts[index].token_ids == model.texts(alone, request)[index].token_ids


def test_a_cut_text_says_so(model: Model) -> None:
    whole = model.texts(model.load(), model.request())[0]
    assert len(whole.token_ids) > 30
    runner = model.load()
    for length in range(1, 30, 4):
        cut = model.texts(runner, model.request(max_new_tokens=length))[0]
        assert (cut.finish_reason, cut.is_complete) == ("length", False)
        assert whole.text.startswith(cut.text)  # never half a character
    last = model.texts(runner, model.request(max_new_tokens=len(whole.token_ids) - 1))[0]
    assert (last.text, last.finish_reason, last.is_complete) == (whole.text, "length", True)
    stopped = model.texts(runner, model.request(stop_strings=('"hero"',)))[0]
    assert (stopped.finish_reason, stopped.is_complete) == ("stop", False)


def test_no_schema_says_nothing_of_completeness(model: Model) -> None:
    assert model.texts(model.load(), model.request(schema=None, max_new_tokens=5))[0].is_complete is None


def test_half_a_character_is_dropped(model: Model) -> None:
    held = Schema(choice_grammar("--choice", ["日本"]), model.vocabulary)
    for length, text in ((1, ""), (2, ""), (3, "日"), (5, "日"), (6, "日本")):
        finished = model.texts(model.load(), model.request(schema=held, max_new_tokens=length))[0]
        assert (finished.text, finished.is_complete) == (text, length == 6)


def test_what_was_said_counts(model: Model) -> None:
    whole = model.texts(model.load(), model.request())[0]
    said = whole.token_ids[:9]
    assert model.texts(model.load(), model.request(said=said))[0].token_ids == whole.token_ids


def test_an_end_that_the_model_is_forced_to_waits_for_the_schema(model: Model) -> None:
    forced = replace(WARM, forced_eos_token_ids=frozenset({EOS_ID}))
    finished = model.texts(model.load(), model.request(sampler=forced, max_new_tokens=8))[0]
    assert (len(finished.token_ids), finished.is_complete) == (8, False)
    assert EOS_ID not in finished.token_ids


def test_the_view_of_a_choice_has_the_schema_first(model: Model) -> None:
    events = Generation(model.load(), model.tokenizer, model.request(num_alternatives=3)).events()
    views = [event for event in events if isinstance(event, Token)]
    text = b""
    for view in views:
        assert view.inspection is not None
        step = view.inspection.steps[0]
        assert (step.name, step.num_left + step.num_removed) == ("schema", 288)
        assert step.chosen_probability > 0
        if text.endswith(b'"he'):
            assert step.num_left == 1
        text += model.tokenizer.token_bytes(view.token_id)


def test_rows_with_and_without_a_schema_side_by_side(model: Model) -> None:
    runner = model.load(3)
    held = model.request(kept_row=None)
    free = model.request(schema=None, max_new_tokens=40)
    digits = model.request(schema=Schema(regex_grammar("--regex", "[0-9]{4}"), model.vocabulary))
    scheduler, texts = Scheduler(runner, model.tokenizer), {}
    numbers = [scheduler.submit(request) for request in (held, free, digits)]
    while not scheduler.is_idle:
        texts |= {event.request: event for event in scheduler.step() if isinstance(event, Finished)}
    for number, request in zip(numbers, (held, free, digits), strict=True):
        assert texts[number].token_ids == model.texts(model.load(), request)[0].token_ids
    assert texts[numbers[2]].text.isdecimal()


def test_a_schema_that_fails_in_the_middle_ends_its_text_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.texts(model.load(), model.request())[0]
    after = whole.token_ids[:9]

    def fault(held: ConstrainedText, **_: bool) -> UsageError | None:
        return UsageError("too complex") if tuple(held._taken[:9]) == after else None

    monkeypatch.setattr(ConstrainedText, "_fault", fault)
    scheduler = Scheduler(model.load(2), model.tokenizer)
    free = model.request(schema=None, max_new_tokens=40)
    numbers = [scheduler.submit(request) for request in (model.request(), free)]
    events: list[Event] = []
    while not scheduler.is_idle:
        events += scheduler.step()
    told = {number: [e.token_id for e in events if isinstance(e, Token) and e.request == number] for number in numbers}
    assert told[numbers[0]] == list(after)
    assert [event.request for event in events if isinstance(event, Failed)] == numbers[:1]
    assert tuple(told[numbers[1]]) == model.texts(model.load(), free)[0].token_ids


def test_a_text_that_llguidance_gives_up_fails_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = lark_grammar("--grammar", f'start: s {"x " * 12}\ns: {"s " * 40}| x | ""\nx: "x"\n')
    monkeypatch.setattr(Matcher.__init__, "__defaults__", (MaskLimits(max_items_in_row=400),))  # after it was tried
    endless = replace(WARM, logit_bias={EOS_ID: -50.0})
    lost = model.request(schema=Schema(grammar, model.vocabulary), sampler=endless)
    scheduler, events = Scheduler(model.load(2), model.tokenizer), list[Event]()
    numbers = [scheduler.submit(request) for request in (lost, model.request())]
    while not scheduler.is_idle:
        events += scheduler.step()
    assert [event.request for event in events if isinstance(event, Failed)] == numbers[:1]
    text = "".join(event.text for event in events if isinstance(event, Token) and event.request == numbers[0])
    assert text == "x" * len(text) != ""
    whole = next(event for event in events if isinstance(event, Finished))
    assert whole.token_ids == model.texts(model.load(), model.request())[0].token_ids


def test_drafts_change_no_text(model: Model) -> None:
    """Most of them are right, all after the first wrong one are not; some are not allowed by the schema."""
    if not model.load().limits.max_drafts:
        pytest.skip("this runner verifies no drafts")
    for index in range(2):
        wanted = model.request(samples=(index,))
        expected = model.texts(model.load(), wanted)[index]
        tokens = (*expected.token_ids, *[EOS_ID] * 8)
        source = ScriptedSource(lambda history, sampler, tokens=tokens: tokens[len(history) - 2], 0.8, index)  # type: ignore[misc]
        drafting = Drafting(source, least=3)
        events = Generation(model.load(), model.tokenizer, wanted, drafting).events()
        (found,) = (event for event in events if isinstance(event, Finished))
        assert (found.token_ids, found.is_complete) == (expected.token_ids, True)
        assert drafting.usage.num_kept > 10


@pytest.mark.parametrize("num_held_tokens", [3, 31])
def test_a_free_text_beside_a_held_one_has_drafts(model: Model, num_held_tokens: int) -> None:
    """For its mask the text with the schema reads the latest step, before the free text has read its earlier ones."""
    held = Schema(regex_grammar("--regex", "[a-z ]{60}"), model.vocabulary)
    requests = []
    for schema, prompt in ((held, (BOS_ID, *range(97, 96 + num_held_tokens))), (None, (BOS_ID, *(97, 98, 99) * 4))):
        greedy = Sampler(
            SamplingParams(temperature=0.0), 1, num_prompt_tokens=len(prompt), eos_token_ids=WARM.eos_token_ids
        )
        requests.append(model.request(prompt_token_ids=prompt, sampler=greedy, max_new_tokens=50, schema=schema))

    def texts(drafting: Drafting | None) -> dict[int, tuple[int, ...]]:
        scheduler, found = Scheduler(model.load(2), model.tokenizer, drafting=drafting), {}
        for request in requests:
            scheduler.submit(request)
        while not scheduler.is_idle:
            found |= {event.request: event.token_ids for event in scheduler.step() if isinstance(event, Finished)}
        return found

    expected = texts(None)
    for least in (0, 1, 7):  # as --draft auto and --draft ngram have it, and with drafts at every place
        assert texts(Drafting(NgramSource(), least=least)) == expected, least


def test_what_must_come_next_is_drafted(model: Model) -> None:
    """Without guesses of its own: keys and punctuation have one form, and so has the text after the first letter."""
    if not model.load().limits.max_drafts:
        pytest.skip("this runner verifies no drafts")
    wanted = model.request(samples=(0, 1))
    drafting = Drafting(NoSource(), least=7)
    events = Generation(model.load(2), model.tokenizer, wanted, drafting).events()
    found = {event.sample: event.token_ids for event in events if isinstance(event, Finished)}
    assert found == {index: one.token_ids for index, one in model.texts(model.load(), wanted).items()}
    assert drafting.usage.num_kept == drafting.usage.num_drafts > 20


class NoSource:
    """A `DraftSource` that guesses nothing."""

    is_free = True

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> "NoSource":
        return self

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def kind(self) -> None: ...

    def close(self) -> None: ...

    def guess(self, count: int) -> tuple[int, ...]:
        return ()


def test_a_kept_row_goes_on_with_another_schema(model: Model) -> None:
    kept, runner = KeptRow(), model.load()
    first = model.texts(runner, model.request(kept_row=kept))[0]
    held = Schema(choice_grammar("--choice", ["yes", "no"]), model.vocabulary)
    second = model.texts(runner, model.request(kept_row=kept, schema=held))[0]
    assert first.is_complete
    assert second.text in ("yes", "no")


def test_a_text_goes_on_behind_what_it_has_said(model: Model) -> None:
    whole = model.texts(model.load(), model.request())[0]
    prompt, said = (BOS_ID, 65), whole.token_ids[:7]
    sampler = replace(WARM, num_prompt_tokens=9)
    request = model.request(
        prompt_token_ids=(*prompt, *said), sampler=sampler, schema=model.schema.behind(said), at_start=False
    )
    assert said + model.texts(model.load(), request)[0].token_ids == whole.token_ids
    with pytest.raises(UsageError, match="does not fit --schema"):
        model.schema.behind((*said, 0))
