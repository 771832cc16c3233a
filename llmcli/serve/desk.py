"""`Desk`: where the event loop hands requests to the worker, and gets their events back.

Bounds how many texts wait. All methods are for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from llmcli.engine.events import Event, Failed, Finished, Token
from llmcli.engine.request import Request
from llmcli.serve.refusal import Refusal
from llmcli.serve.worker import Job, Scheduler, Worker


class Texts:
    """The texts of one client, of one request or several; leaving the `with` cancels what has not ended.

    Events wait here until the client takes them. There are no more of them than the texts have tokens.

    Attributes: first_token_time: by time.perf_counter; None before there is a token
    """

    def __init__(self, desk: Desk, requests: Sequence[Request], *, in_pieces: bool):
        self.requests = requests
        self.first_token_time: float | None = None
        self._desk = desk
        self._in_pieces = in_pieces
        self._events: list[tuple[int, Event]] = []
        self._has_events = asyncio.Event()
        self._num_open = sum(len(request.samples) for request in requests)
        self._jobs = {desk.begin(self, request): index for index, request in enumerate(requests)}

    @property
    def num_open(self) -> int:
        """Texts that have not ended."""
        return self._num_open

    async def batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """All events that have come since the last batch, each with the index of its request, until all texts ended.

        Without `in_pieces` there is one batch: waking for each of many clients at each token costs as much as the rest.

        Raises: the error of a text that failed
        """
        while self._num_open or self._events:
            await self._has_events.wait()
            self._has_events.clear()
            events, self._events = self._events, []
            for _, event in events:
                if isinstance(event, Failed):
                    raise event.error
            yield events

    def take(self, job: Job, event: Event) -> None:
        """Note an event of one of the jobs."""
        if job not in self._jobs:
            return
        if isinstance(event, Failed):
            self._num_open = 0
        elif isinstance(event, Finished):
            self._num_open -= 1
        elif isinstance(event, Token) and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self._events.append((self._jobs[job], event))
        if self._in_pieces or self._num_open == 0:
            self._has_events.set()

    def __enter__(self) -> Texts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for job in self._jobs:
            self._desk.end(job)
        self._num_open = 0


class Desk:
    """See the module. Make it in the running event loop; `open` and `close` start and stop the worker."""

    def __init__(self, scheduler: Scheduler, *, max_waiting: int):
        """`max_waiting` texts may wait beside those that have a row."""
        self.worker = Worker(scheduler, self._deliver)
        self.scheduler = scheduler
        self._max_texts = max_waiting + scheduler.usage.num_rows
        self._max_waiting = max_waiting
        self._texts: dict[Job, Texts] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def num_texts(self) -> int:
        """Texts that wait or run."""
        return sum(texts.num_open for texts in {id(texts): texts for texts in self._texts.values()}.values())

    def submit(self, requests: Sequence[Request], *, in_pieces: bool = True) -> Texts:
        """Begin the texts of some requests. Use the result in a `with`; `in_pieces` as for `Texts.batches`.

        Raises: Refusal if too many texts wait, or if the device has failed
        """
        if (fault := self.worker.fault) is not None:
            raise Refusal(503, f"{fault}; the server cannot continue; restart it", code="device_failed")
        num_new = sum(len(request.samples) for request in requests)
        if self.num_texts + num_new > self._max_texts:
            raise Refusal(
                429,
                f"{self.num_texts} texts are waiting or running and this request adds {num_new}; "
                f"at most {self._max_waiting} may wait; try again later",
                code="queue_full",
            )
        return Texts(self, requests, in_pieces=in_pieces)

    def begin(self, texts: Texts, request: Request) -> Job:
        """Hand over one request of `texts`."""
        job = self.worker.submit(request)
        self._texts[job] = texts
        return job

    def end(self, job: Job) -> None:
        """Forget a job; what is left of it is cancelled."""
        if self._texts.pop(job, None) is not None:
            self.worker.cancel(job)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:  # the loop is closed: nobody listens
            return

    def _take(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            if (texts := self._texts.get(job)) is not None:
                texts.take(job, event)
