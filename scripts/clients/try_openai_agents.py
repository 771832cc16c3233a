"""The OpenAI Agents SDK: its guides to tools and output types, by the Responses API, its default, and by chat."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from harness import MODEL, QUESTION, assert_answered, get_weather, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: float


def agent(model=MODEL, **keys) -> Agent:
    """The agent of the guide."""
    tools = [function_tool(get_weather)]
    return Agent(name="Weather agent", instructions="Answer by the tools.", model=model, tools=tools, **keys)


def chat_model() -> OpenAIChatCompletionsModel:
    """The model by chat completions."""
    return OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())


def chat() -> None:
    """A tool, then an answer, by chat completions."""
    assert_answered(Runner.run_sync(agent(chat_model()), QUESTION).final_output)


def chat_streamed() -> None:
    """The same as a stream."""
    assert_answered(asyncio.run(streamed(agent(chat_model()))))


async def streamed(one: Agent) -> str:
    """The last output of a stream."""
    result = Runner.run_streamed(one, QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds, kinds
    return result.final_output


def chat_output_type() -> None:
    """A tool, then an answer in the form of a class."""
    result = Runner.run_sync(agent(chat_model(), output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)
    assert_answered("22 degrees")


def responses() -> None:
    """As `chat`."""
    assert_answered(Runner.run_sync(agent(), QUESTION).final_output)


def responses_streamed() -> None:
    """As `chat_streamed`."""
    assert_answered(asyncio.run(streamed(agent())))


def responses_output_type() -> None:
    """As `chat_output_type`."""
    result = Runner.run_sync(agent(output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)
    assert_answered("22 degrees")


report("openai-agents", chat, chat_streamed, chat_output_type, responses, responses_streamed, responses_output_type)
