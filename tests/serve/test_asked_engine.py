"""An engine that is asked for what has ended: its texts, and which errors are a request's and which its own."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from paged import hold_to_nothing, ids_alone, make_request, open_scheduler

from llmcli import __version__
from llmcli.engine.events import Event, Failed, Finished
from llmcli.engine.remote.asked import AskedEngine, EngineFacts, OpenedEngine
from llmcli.engine.request import Request
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, InsufficientMemoryError, UsageError
from llmcli.tokenizer.base import Tokenizer

SECONDS = 30.0


def opened(scheduler: Any) -> AskedEngine:
    engine = AskedEngine()
    facts = EngineFacts("paper", 1.5, {"config.json": "7 bytes"}, 4)
    assert engine.open(lambda: OpenedEngine(scheduler, hold_to_nothing, facts)) is facts
    return engine


def test_requests_come_and_texts_go(tokenizer: Tokenizer) -> None:
    engine = opened(open_scheduler(tokenizer))
    assert engine.version() == __version__
    assert engine.exchange([], 0.0).ended == []
    requests = {number: make_request([number + 97], number) for number in range(20)}
    texts = {}
    waiting = [(number, request, None) for number, request in requests.items()]
    while len(texts) < len(requests):
        answer = engine.exchange(waiting[:3], SECONDS)
        del waiting[:3]
        assert answer.fault is None
        for event in answer.ended:
            assert isinstance(event, Finished)
            assert event.request not in texts
            texts[event.request] = list(event.token_ids)
    assert texts == {number: ids_alone(request, 0) for number, request in requests.items()}
    assert answer.usage.steps > 0
    assert len(pickle.dumps(answer)) < 2000


def test_a_grammar_that_cannot_be_held_fails_alone(tokenizer: Tokenizer) -> None:
    engine = opened(open_scheduler(tokenizer))
    grammar: Any = SimpleNamespace(name="--regex")
    ended = list(engine.exchange([(7, make_request([97], 1), grammar)], SECONDS).ended)
    (failed,) = ended
    assert isinstance(failed, Failed)
    assert (failed.request, type(failed.error), str(failed.error)) == (7, UsageError, "--regex cannot be held here")
    assert len(engine.exchange([(8, make_request([97], 1), None)], SECONDS).ended) == 1


@pytest.mark.parametrize("error", [DeviceError("the card fell off"), InsufficientMemoryError("full"), OSError("odd")])
def test_an_error_of_the_device_is_no_text_of_any_request(error: Exception) -> None:
    class Broken:
        usage, is_idle, num_waiting = Usage(4), True, 0

        def submit(self, request: Request) -> int:
            self.is_idle = False
            return 1

        def step(self) -> list[Event]:
            raise error

        def interrupt(self) -> list[Event]:
            self.is_idle = True
            return []

    engine = opened(Broken())
    answer = engine.exchange([(1, make_request([97], 1), None)], SECONDS)
    assert answer.ended == []
    assert answer.fault is not None
    assert str(error) in str(answer.fault)
    assert isinstance(pickle.loads(pickle.dumps(answer)).fault, DeviceError)


def test_a_model_that_cannot_be_opened_is_an_answer() -> None:
    def refuse() -> OpenedEngine:
        raise UsageError("no such model")

    told = AskedEngine().open(refuse)
    assert (type(told), str(told)) == (UsageError, "no such model")
