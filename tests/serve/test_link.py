"""The link between the two processes: a reading end never waits for a writing one."""

import asyncio
import threading
import time
from multiprocessing import Pipe

from paged import ENDLESS, make_request, open_desk, open_scheduler

from llmcli.serve.link import Sender
from llmcli.tokenizer.base import Tokenizer

LARGE = "x" * 400_000  # more than a socket holds
SECONDS = 30


def test_both_ends_may_write_at_once() -> None:
    """Each writes more than the link holds before it reads."""
    here, there = Pipe()
    senders = Sender(here), Sender(there)
    start_time = time.monotonic()
    for index in range(20):
        for sender in senders:
            sender.send(index, LARGE)
    assert time.monotonic() - start_time < SECONDS / 2
    for end in (here, there):
        assert [end.recv()[0] for _ in range(20)] == list(range(20))
    for sender in senders:
        sender.close()


def test_who_makes_many_messages_waits_and_is_let_go() -> None:
    here, there = Pipe()
    sender, has_ended = Sender(here), threading.Event()

    def make() -> None:
        for _ in range(200):
            sender.wait_for_room()
            sender.send(LARGE)
        has_ended.set()

    threading.Thread(target=make, daemon=True).start()
    assert not has_ended.wait(0.3)
    for _ in range(150):
        there.recv()
    there.close()  # a broken link lets both go on, too
    assert has_ended.wait(SECONDS)


def test_large_requests_states_and_events_pass_each_other(tokenizer: Tokenizer) -> None:
    """The engine's answers fill the link while the front sends large requests and asks for states in a loop."""

    async def test() -> None:
        async with open_desk(open_scheduler(tokenizer, num_rows=4), max_waiting=100) as desk:
            num_states = 0

            async def ask() -> None:
                nonlocal num_states
                while True:
                    await desk.engine.state()
                    num_states += 1

            async def send_large(seed: int) -> None:
                for _ in range(2):
                    request = make_request([97], seed, most=1)
                    object.__setattr__(request, "stop_strings", (LARGE,) * 4)
                    with desk.submit([request]) as texts:
                        async for _ in texts.batches():
                            pass

            askers = [asyncio.create_task(ask()) for _ in range(4)]
            with desk.submit([make_request([97], ENDLESS, num_samples=32, most=900)]) as stream:
                reading = asyncio.create_task(anext(aiter(stream.batches())))  # then it reads no more
                await asyncio.gather(*(send_large(seed) for seed in range(4)))
                await reading
            assert num_states > 10
            for asker in askers:
                asker.cancel()
            await asyncio.gather(*askers, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 2 * SECONDS))
