"""A prompt that repeats itself, requests for it, and a client's view of a run."""

from collections.abc import Sequence
from dataclasses import replace

from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Event, Finished, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.runners.base import Runner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer

PROMPT = (*b"one two three one two three one two",)


def request(temperature: float = 0.0, samples: Sequence[int] = (0,), most: int | None = 60) -> Request:
    params = SamplingParams(temperature=temperature, top_p=1.0)
    return Request(PROMPT, Sampler(params, seed=3, num_prompt_tokens=len(PROMPT)), tuple(samples), most)


def run(runner: Runner, tokenizer: Tokenizer, wanted: Request, drafting: Drafting | None = None) -> list[Event]:
    scheduler = Scheduler(runner, tokenizer, drafting=drafting)
    scheduler.submit(wanted)
    events: list[Event] = []
    while not scheduler.is_idle:
        events += scheduler.step()
    return events


def told(events: Sequence[Event]) -> list[Event]:
    """A client's view of texts, without times."""
    kept = [event for event in events if isinstance(event, Token | Finished)]
    ends = {event.sample: event for event in kept if isinstance(event, Finished)}
    tokens = sorted((event for event in kept if isinstance(event, Token)), key=lambda event: event.sample)
    return [*tokens, *(replace(ends[sample], timings=None) for sample in sorted(ends))]  # type: ignore[arg-type]


def loop(history: Sequence[int], sampler: Sampler) -> int:
    """A text that repeats itself."""
    return 65 + len(history) % 9
