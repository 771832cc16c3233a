"""A scheduler with one row: requests one after the other. Stands in until the engine's own serves many rows."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmcli.engine.events import Event, Failed, Finished, Token
from llmcli.engine.generation import Generation, Request
from llmcli.errors import LLMCliError
from llmcli.runners.base import Runner
from llmcli.tokenizer.base import Tokenizer


@dataclass
class OneRowUsage:
    """See `llmcli.batch.run.Usage`."""

    prompt_tokens_computed: int = 0
    prompt_tokens_shared: int = 0
    steps: int = 0
    row_steps: int = 0
    num_rows: int = 1
    preemptions: int = 0


class OneByOne:
    """See `llmcli.batch.run.Scheduler`."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer):
        self.usage = OneRowUsage()
        self._runner = runner
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: tuple[int, Request, Iterator[Event]] | None = None
        self._num_submitted = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self._running is None and not self._waiting

    def submit(self, request: Request) -> int:
        """Take a request; return its number."""
        self._num_submitted += 1
        self._waiting.append((self._num_submitted, request))
        return self._num_submitted

    def step(self) -> list[Event | Failed]:
        """The next event of the request that runs."""
        if self._running is None:
            number, request = self._waiting.popleft()
            self._running = number, request, Generation(self._runner, self._tokenizer, request).events()
        number, request, events = self._running
        try:
            event = next(events, None)
        except LLMCliError as error:
            self._running = None
            return [Failed(request.samples[0], error, number)]
        if event is None:
            self._running = None
            return []
        if isinstance(event, Token):
            self.usage.steps += 1
            self.usage.row_steps += 1
        elif isinstance(event, Finished):
            self.usage.prompt_tokens_computed += event.timings.prefill_tokens
            self.usage.prompt_tokens_shared += len(request.prompt_token_ids) - event.timings.prefill_tokens
            self._running = None
        return [replace(event, request=number)]
