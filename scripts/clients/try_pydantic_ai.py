"""Pydantic AI: the examples of its pages on tools and output, in its default mode, tool output."""

import asyncio

from harness import MODEL, QUESTION, assert_answered, get_weather, report
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: float


def agent(model=None, **keys) -> Agent:
    """The agent of the guide, by chat completions."""
    return Agent(model or OpenAIChatModel(MODEL), tools=[get_weather], instructions="Answer by the tools.", **keys)


def tools() -> None:
    """A tool, then an answer."""
    assert_answered(agent().run_sync(QUESTION).output)


def tools_streamed() -> None:
    """The same as a stream."""

    async def run() -> str:
        async with agent().run_stream(QUESTION) as result:
            parts = [part async for part in result.stream_text(delta=True)]
        return "".join(parts)

    assert_answered(asyncio.run(run()))


def output_type() -> None:
    """A tool, then an answer in the form of a class."""
    assert isinstance(agent(output_type=Weather).run_sync(QUESTION).output, Weather)
    assert_answered("22 degrees")


def output_type_streamed() -> None:
    """The same as a stream."""

    async def run() -> Weather:
        async with agent(output_type=Weather).run_stream(QUESTION) as result:
            return [part async for part in result.stream_output()][-1]

    assert isinstance(asyncio.run(run()), Weather)
    assert_answered("22 degrees")


def named() -> None:
    """The model by its name alone, as the README does: its default API."""
    assert isinstance(agent(f"openai:{MODEL}", output_type=Weather).run_sync(QUESTION).output, Weather)
    assert_answered("22 degrees")


report("pydantic-ai-slim", tools, tools_streamed, output_type, output_type_streamed, named)
