"""Work of many clients in one thread: in turn, cancelled if nobody waits, and failing for its own client only."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from starlette.types import Message, Receive, Scope, Send

from llmcli.serve.gate import Gate
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import FairThread, Metrics, unless_gone


def test_clients_have_their_turns() -> None:
    """A large request delays another by one piece of work, not by all."""

    async def test() -> None:
        thread, may_begin = FairThread("test"), threading.Event()
        done: list[str] = []

        def work(name: str) -> Callable[[], None]:
            def begin() -> None:
                may_begin.wait(10)
                done.append(name)

            return begin

        asked = [asyncio.create_task(thread.run("a", work(f"a{index}"))) for index in range(5)]
        await asyncio.sleep(0)
        asked += [asyncio.create_task(thread.run(client, work(client + "0"))) for client in "bc"]
        asked.append(asyncio.create_task(thread.run("b", work("b1"))))
        await asyncio.sleep(0)
        asked[2].cancel()
        may_begin.set()
        await asyncio.gather(*asked, return_exceptions=True)
        assert done == ["a0", "a1", "b0", "c0", "a3", "b1", "a4"]
        thread.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_fault_is_its_own_clients() -> None:
    async def test() -> None:
        thread = FairThread("test")
        fails, works = thread.run("a", lambda: 1 // 0), thread.run("b", lambda: 7)
        with pytest.raises(ZeroDivisionError):
            await fails
        assert await works == 7
        thread.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_refused_request_leaves_nothing_for_the_collector() -> None:
    """A body of 8 MB that waits for Python's collector takes its memory until then."""

    class Content:
        """The objects in the frames of a request."""

    contents: list[weakref.ref[Content]] = []
    thread = FairThread("test")

    def work(content: Content) -> None:
        raise Refusal(400, "no")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content = Content()
        contents.append(weakref.ref(content))
        await unless_gone(thread.run("client", partial(work, content)), receive)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def test() -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        gate = Gate(app, None, (), Metrics(), (), lambda line: None)
        for _ in range(3):
            await gate({"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "headers": []}, receive, send)
            await asyncio.sleep(0.01)
        assert [message["status"] for message in sent if "status" in message] == [400, 400, 400]

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(test(), 30))
        assert [content() for content in contents] == [None, None, None]
    finally:
        gc.enable()
        thread.close()
