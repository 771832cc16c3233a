"""Work of many clients in one thread: in turn, cancelled when nobody waits, and failing for its own client alone."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from llmcli.serve.service import FairThread


def test_clients_have_their_turns() -> None:
    """One that asks for much delays another by one piece of work, not by all."""

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
