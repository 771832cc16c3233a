"""Work for a client that may go away: what nobody waits for any more is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of some work for a client whose body has been read. Raises: ClientDisconnect once it goes away"""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working  # else error, traceback and this frame would be a reference cycle


async def until_gone(receive: Receive) -> None:
    """Wait until a client goes away whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
