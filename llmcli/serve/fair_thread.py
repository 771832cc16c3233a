"""`FairThread`: one thread that works for many clients in turn, so that who asks for much delays nobody else long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class FairThread:
    """See the module. Its methods are for the event loop's thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        # Of each client that waits: its work, in order. The next client comes first.
        self._waiting: dict[Hashable, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        self._is_busy = False

    async def run(self, client: Hashable, work: Callable[[], Result]) -> Result:
        """The result of some work, once the client's turn has come. Cancelled before it has begun, it is not done.

        Raises: what the work raises
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((work, result))
        self._begin_next()
        try:
            return await result
        finally:
            del result  # else error, traceback and this frame would be a reference cycle, which keeps a long body

    def close(self) -> None:
        """End the thread; what it does is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while self._waiting and not self._is_busy:
            client = next(iter(self._waiting))
            of_client = self._waiting.pop(client)
            while of_client and of_client[0][1].cancelled():
                of_client.popleft()
            if not of_client:
                continue
            work, result = of_client.popleft()
            if of_client:
                self._waiting[client] = of_client  # after the others
            self._is_busy = True
            doing = result.get_loop().run_in_executor(self._thread, work)
            doing.add_done_callback(partial(self._end, result))

    def _end(self, result: asyncio.Future[Any], doing: asyncio.Future[Any]) -> None:
        self._is_busy = False
        self._begin_next()
        if doing.cancelled():
            return
        error = doing.exception()
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(doing.result())
