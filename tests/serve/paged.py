"""Schedulers over a device without a model, and each request's expected texts, from a function alone."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import Pipe

from page_device import PageDevice
from tiny_models import EOS_ID

from llmcli.engine.remote.link import EngineEnd, FrontEnd
from llmcli.engine.remote.worker import Hold
from llmcli.engine.request import Request
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import UsageError
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.schema.grammar import Grammar
from llmcli.serve.service import Desk
from llmcli.tokenizer.base import Tokenizer

ENDLESS = 1_000_000  # a seed


def next_token(history: Sequence[int], sampler: Sampler) -> int:
    """A token that depends on everything before it; one in 50 ends the text, but none with the seed ENDLESS."""
    rng = random.Random(f"{list(history)} {sampler.seed} {sampler.sample_index}")
    return EOS_ID if rng.random() < 0.02 and sampler.seed != ENDLESS else rng.randrange(97, 123)


def ids_alone(request: Request, sample: int) -> list[int]:
    """The tokens of one text, by the function alone."""
    sampler, token_ids = replace(request.sampler, sample_index=sample), []
    while len(token_ids) < (request.max_new_tokens or 0) and token_ids[-1:] != [EOS_ID]:
        token_ids.append(next_token([*request.prompt_token_ids, *token_ids], sampler))
    return token_ids


def open_scheduler(tokenizer: Tokenizer, *, num_rows: int = 4, works_ahead: bool = False) -> Scheduler:
    device = PageDevice(next_token, num_rows=num_rows, works_ahead=works_ahead)
    return Scheduler(SteppingRunner(device), tokenizer)


def make_request(prompt: Sequence[int], seed: int, num_samples: int = 1, most: int = 30) -> Request:
    sampler = Sampler(SamplingParams(), seed=seed, num_prompt_tokens=len(prompt), eos_token_ids=frozenset({EOS_ID}))
    return Request(tuple(prompt), sampler, tuple(range(num_samples)), most)


def hold_to_nothing(request: Request, grammar: Grammar) -> Request:
    """Fail: without a model there are no tokens for a schema."""
    raise UsageError(f"{grammar.name} cannot be held here")


@asynccontextmanager
async def open_desk(scheduler: Scheduler, *, max_waiting: int, hold: Hold = hold_to_nothing) -> AsyncIterator[Desk]:
    """A desk whose engine runs in a thread, at the other end of the link that processes have."""
    here, there = Pipe()
    end = EngineEnd(there, scheduler, hold)
    thread = threading.Thread(target=end.run, daemon=True)
    thread.start()
    _, begin_state = await asyncio.to_thread(here.recv)
    engine = FrontEnd(here, begin_state, on_lost=lambda: None)
    try:
        yield Desk(engine, max_waiting=max_waiting)
    finally:
        engine.close()
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()
