"""The event loop's side: batches of events, a bound on waiting requests, and clients that leave."""

import asyncio
import threading
from collections.abc import Coroutine
from multiprocessing import Pipe
from typing import Any

import pytest
from paged import ENDLESS, ids_alone, make_request, open_desk, open_scheduler
from starlette.requests import ClientDisconnect

from llmcli.engine.events import Event, Finished, Timings, Token
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, UsageError
from llmcli.schema.constraint import Constraint
from llmcli.serve.desk import Desk, Texts
from llmcli.serve.link import EngineState, FrontEnd
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import ClientLimits, Service, unless_gone
from llmcli.tokenizer.base import Tokenizer


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


async def read(texts: Texts) -> dict[tuple[int, int], list[int]]:
    """The tokens of every text, by request and sample, as they came; the ends must repeat them."""
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], list[int]] = {}
    with texts:
        async for batch in texts.batches():
            for index, event in batch:
                if isinstance(event, Token):
                    tokens.setdefault((index, event.sample), []).append(event.token_id)
                elif isinstance(event, Finished):
                    ends[index, event.sample] = list(event.token_ids)
    assert tokens == ends
    return ends


def test_many_clients_read_their_own_texts(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with open_desk(open_scheduler(tokenizer), max_waiting=100) as desk:
            pairs = [[make_request([97, seed], seed), make_request([98, seed], seed, 2)] for seed in range(20)]
            for pair, read_texts in zip(
                pairs, await asyncio.gather(*(read(desk.submit(pair)) for pair in pairs)), strict=True
            ):
                assert read_texts == {
                    (index, sample): ids_alone(request, sample)
                    for index, request in enumerate(pair)
                    for sample in request.samples
                }
            assert desk.num_texts == 0

    run(test())


def test_too_many_are_refused_until_others_end(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with open_desk(open_scheduler(tokenizer, num_rows=2), max_waiting=3) as desk:
            texts = desk.submit([make_request([97], 1, num_samples=5)])
            with pytest.raises(Refusal, match="5 texts are waiting or running") as caught:
                desk.submit([make_request([97], 2)])
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            await read(texts)
            assert await read(desk.submit([make_request([97], 2)])) == {(0, 0): ids_alone(make_request([97], 2), 0)}

    run(test())


def test_more_texts_than_ever_fit_are_no_matter_of_time(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        async with open_desk(open_scheduler(tokenizer, num_rows=2), max_waiting=3) as desk:
            for requests, param in (
                ([make_request([97], 1, num_samples=6)], "n"),
                ([make_request([97], 1)] * 6, "prompt"),
            ):
                with pytest.raises(Refusal, match="6 texts, expected at most 5: 2 that run and 3 that may") as caught:
                    desk.submit(requests)
                assert (caught.value.status, caught.value.param) == (400, param)
            with desk.submit([make_request([97], 1)] * 5):  # as many as fit
                pass

    run(test())


def test_who_leaves_frees_rows_and_queue(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        scheduler = open_scheduler(tokenizer, num_rows=2)
        async with open_desk(scheduler, max_waiting=4) as desk:
            for _ in range(50):
                with desk.submit([make_request([97], ENDLESS, num_samples=6, most=900)]) as texts:
                    async for _ in texts.batches():
                        break
                assert desk.num_texts == 0
            request = make_request([98], 4)
            assert await read(desk.submit([request])) == {(0, 0): ids_alone(request, 0)}
        assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages

    run(test())


def test_a_fault_is_raised_to_the_reader(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scheduler = open_scheduler(tokenizer)
        async with open_desk(scheduler, max_waiting=4) as desk:

            def fail() -> None:
                raise DeviceError("the card is gone")

            monkeypatch.setattr(scheduler, "step", fail)
            with pytest.raises(DeviceError, match="the card is gone"):
                await read(desk.submit([make_request([97], 1), make_request([98], 1)]))
            assert desk.num_texts == 0

    run(test())


def test_a_text_that_ended_just_before_the_engine_is_whole() -> None:
    async def test() -> None:
        here, there = Pipe()
        engine = FrontEnd(here, EngineState(Usage(1), 0, 0, 0), on_lost=lambda: None)
        desk = Desk(engine, max_waiting=2)
        texts, cut = desk.submit([make_request([97], 1)]), desk.submit([make_request([97], 2)])
        _, key, *_ = there.recv()
        there.send(("events", [(key, Finished(0, "", "b", (98,), "length", Timings(0, 0.0, 0.0, 0, 0.0)))], None))
        there.close()
        async for batch in texts.batches():
            assert [(index, event.text) for index, event in batch if isinstance(event, Finished)] == [(0, "b")]
        with pytest.raises(DeviceError, match="has ended"):
            await read(cut)

    run(test())


class SlowSchemas:
    """A model whose schemas are read when `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_read = 0

    def grammar(self, constraint: Constraint) -> None:
        self.num_read += 1
        self.may_end.wait(30)
        raise UsageError("no schema")


def test_a_schema_is_waited_for_as_long_as_for_an_answer(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        model = SlowSchemas()
        async with open_desk(open_scheduler(tokenizer, num_rows=1), max_waiting=1) as desk:
            service = Service(model, desk, ClientLimits(1000, 0.2))  # type: ignore[arg-type]

            async def ask() -> None:
                with desk.waiting(1, "n"):
                    async with service.limits.timed():
                        await service.read_schema("a client", Constraint("regex", "regex", "a"))

            asked = [asyncio.create_task(ask()) for _ in range(3)]
            first, second, third = await asyncio.gather(*asked, return_exceptions=True)
            for refusal, status in ((first, 504), (second, 504), (third, 429)):
                assert isinstance(refusal, Refusal)
                assert refusal.status == status
            assert desk.num_texts == 0
            model.may_end.set()
            with pytest.raises(Refusal, match="no schema"):
                await ask()
            assert model.num_read == 2  # the second never began
            service.close()

    run(test())


def test_who_leaves_while_a_schema_waits_is_noticed(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        model, leaves = SlowSchemas(), asyncio.Event()

        async def receive() -> dict[str, str]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        async with open_desk(open_scheduler(tokenizer, num_rows=1), max_waiting=1) as desk:
            service = Service(model, desk, ClientLimits(1000, None))  # type: ignore[arg-type]

            async def ask() -> None:
                with desk.waiting(1, "n"):
                    await unless_gone(service.read_schema("a client", Constraint("regex", "regex", "a")), receive)

            asked = [asyncio.create_task(ask()) for _ in range(2)]
            while not model.num_read:
                await asyncio.sleep(0.01)
            leaves.set()
            first, second = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
            assert isinstance(first, ClientDisconnect)
            assert isinstance(second, ClientDisconnect)
            assert desk.num_texts == 0
            leaves.clear()
            model.may_end.set()
            with pytest.raises(Refusal, match="no schema"):
                await ask()
            assert model.num_read == 2  # the second never began
            service.close()

    run(test())


def test_the_state_is_told_while_a_step_runs(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        scheduler, may_end = open_scheduler(tokenizer), threading.Event()
        step = scheduler.step

        def slow_step() -> list[Event]:
            may_end.wait(30)
            return step()

        monkeypatch.setattr(scheduler, "step", slow_step)
        async with open_desk(scheduler, max_waiting=4) as desk:
            reading = asyncio.create_task(read(desk.submit([make_request([97], 1)])))
            for _ in range(3):
                state = await asyncio.wait_for(desk.engine.state(), 10)
                assert state.free_pages == state.num_pages
            may_end.set()
            await reading

    run(test())
