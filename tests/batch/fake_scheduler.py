"""A scheduler without a model: rows, waiting requests, and texts that follow from the request alone."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmcli.engine.request import Event, Failed, Finished, Request, Timings, Token
from llmcli.errors import DeviceError

TIMINGS = Timings(1, 0.0, 0.0, 0, 0.0)


@dataclass
class FakeUsage:
    num_rows: int
    prompt_tokens_computed: int = 0
    prompt_tokens_shared: int = 0
    steps: int = 0
    row_steps: int = 0
    preemptions: int = 0


def length_of(request: Request) -> int:
    """Tokens of a request's text: texts end in a different order than they begin."""
    return 1 + sum(request.prompt_token_ids) % 7


def text_of(request: Request) -> str:
    return f"{request.sampler.seed}/{request.samples[0]}/{sum(request.prompt_token_ids)}"


@dataclass
class FakeScheduler:
    """Requests whose prompt holds `failing` fail; the step after `last_step` is a Ctrl-C."""

    num_rows: int = 3
    failing: int | None = None
    last_step: int | None = None
    most_waiting: int = 0
    waiting: deque[tuple[int, Request]] = field(default_factory=deque)
    running: dict[int, tuple[Request, int]] = field(default_factory=dict)
    submitted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.usage = FakeUsage(self.num_rows)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, request: Request) -> int:
        self.submitted.append(request)
        self.waiting.append((len(self.submitted), request))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return len(self.submitted)

    def step(self) -> Sequence[Event]:
        if self.usage.steps == self.last_step:
            raise KeyboardInterrupt
        self.usage.steps += 1
        while self.waiting and len(self.running) < self.num_rows:
            number, request = self.waiting.popleft()
            self.running[number] = request, 0
        events: list[Event] = []
        for number, (request, count) in list(self.running.items()):
            self.usage.row_steps += 1
            sample = request.samples[0]
            if self.failing in request.prompt_token_ids:
                events.append(Failed(sample, DeviceError("the card fell off"), number))
                del self.running[number]
                continue
            events.append(Token(sample, count, "x", request=number))
            self.running[number] = request, count + 1
            if count + 1 == length_of(request):
                text = text_of(request)
                events.append(Finished(sample, "", text, (*range(count + 1),), "length", TIMINGS, number))
                del self.running[number]
        return events
