"""Many clients at once: each checks its texts against single runs, and the memory does not grow."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from raw_client import get, metric, request_bytes
from server import ServerProcess, running_server

from llmcli.checkpoint.model import open_model
from llmcli.engine.request import Finished, Request
from llmcli.engine.scheduler import Generation
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.numpy.load import load
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.load import load_tokenizer

COMPLETE = "/v1/completions"
PARAMS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.02}
MAX_GROWTH_BYTES = 24 * 2**20


@dataclass(frozen=True)
class Asked:
    """A request, and the text of a single run."""

    prompt: str
    seed: int
    max_tokens: int
    text: str


def texts_alone(count: int) -> list[Asked]:
    """Requests with their texts, each run by itself on a runner of one row."""
    rng = random.Random(7)
    folder = resource_folder(STORYTELLER)
    model, tokenizer = open_model(folder), load_tokenizer(folder)
    runner = load(model, max_seq_len=1024)
    words = ["Once upon a time", "The cloud said", "Kaspar", "An old owl", "Near Honey Bridge", "One Friday Maud"]
    asked = []
    for seed in range(count):
        prompt, most = " ".join(rng.choices(words, k=rng.randint(1, 12))), rng.randint(1, 16)
        token_ids = tuple(tokenizer.encode(prompt))
        eos = frozenset(tokenizer.eos_token_ids)
        sampler = Sampler(SamplingParams(**PARAMS), seed=seed, num_prompt_tokens=len(token_ids), eos_token_ids=eos)
        events = Generation(runner, tokenizer, Request(token_ids, sampler, (0,), most)).events()
        (end,) = (event for event in events if isinstance(event, Finished))
        asked.append(Asked(prompt, seed, most, end.text))
    return asked


async def ask(port: int, one: Asked, rng: random.Random) -> str:
    """One request on a connection of its own: whole, streamed, or streamed and left."""
    is_stream = rng.random() < 0.6
    body = {"prompt": one.prompt, "seed": one.seed, "max_tokens": one.max_tokens, "stream": is_stream, **PARAMS}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        more = "Connection: close\r\n"
        writer.write(request_bytes(COMPLETE, json.dumps(body).encode(), more=more))
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 0.2)
            return "left"
        answer = await reader.read()
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], answer[:500]
        assert told(content, is_stream) == one.text, one
        return "streamed" if is_stream else "whole"
    finally:
        writer.close()


def told(content: bytes, is_stream: bool) -> str:
    if not is_stream:
        return str(json.loads(content)["choices"][0]["text"])
    pieces = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
    assert b"data: [DONE]" in content
    return "".join(piece["choices"][0]["text"] for piece in pieces)


async def talk(port: int, asked: list[Asked], num_clients: int, seconds: float) -> Counter[str]:
    """All clients, each with one request after another until the time is over."""
    end_time = time.monotonic() + seconds
    outcomes: Counter[str] = Counter()

    async def client(number: int) -> None:
        rng = random.Random(number)
        while True:
            outcomes[await ask(port, rng.choice(asked), rng)] += 1
            if time.monotonic() > end_time:
                return

    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            clients.create_task(client(number))
    return outcomes


def memory_of(server: ServerProcess) -> list[int]:
    """The memory of the engine's process and of the front's."""
    engine = psutil.Process(server.process.pid)
    return [int(process.memory_info().rss) for process in (engine, *engine.children())]


def test_many_clients_at_once(pytestconfig: pytest.Config) -> None:
    num_clients, seconds = pytestconfig.getoption("--serve-clients"), pytestconfig.getoption("--serve-seconds")
    asked = texts_alone(24)
    assert len({one.text for one in asked}) > 20
    with running_server("--max-queue", 2 * num_clients) as server:
        asyncio.run(talk(server.port, asked, num_clients, 0))  # what grows only once has grown
        before = memory_of(server)
        outcomes = asyncio.run(talk(server.port, asked, num_clients, seconds))
        assert min(outcomes["whole"], outcomes["streamed"]) > 0, outcomes
        end_time = time.monotonic() + 60
        while metric(server.port, "texts") or metric(server.port, "pages_free") != metric(server.port, "pages"):
            assert time.monotonic() < end_time, get(server.port, "/metrics")[1]
            time.sleep(0.1)
        growth = [now - then for now, then in zip(memory_of(server), before, strict=True)]
        assert max(growth) < MAX_GROWTH_BYTES, growth
        statuses = Counter(line.split()[3] for line in server.lines if " /v1/completions " in line)
        assert set(statuses) <= {"200", "499"}, statuses
        report: dict[str, Any] = {"outcomes": dict(outcomes), "statuses": dict(statuses)}
        print(report, "memory", before, memory_of(server))
