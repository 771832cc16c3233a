"""LlamaIndex: its agent with a function, and structured output."""

import asyncio

from harness import KEY, MODEL, QUESTION, URL, assert_answered, get_weather, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

llm = OpenAILike(
    model=MODEL, api_base=URL, api_key=KEY, context_window=16384, is_chat_model=True, is_function_calling_model=True
)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: float


async def run(**keys) -> str:
    """The agent's answer."""
    agent = FunctionAgent(tools=[get_weather], llm=llm, system_prompt="Answer by the tools.", **keys)
    return str(await agent.run(user_msg=QUESTION))


def agent_streamed() -> None:
    """A tool, then an answer; by streams, the default."""
    assert_answered(asyncio.run(run()))


def agent() -> None:
    """The same without streams."""
    assert_answered(asyncio.run(run(streaming=False)))


def structured() -> None:
    """An object."""
    prompt = PromptTemplate("What is the weather in {city}?")
    assert isinstance(llm.structured_predict(Weather, prompt, city="Rome"), Weather)


def structured_streamed() -> None:
    """An object that grows."""
    prompt = PromptTemplate("What is the weather in {city}?")
    assert isinstance(list(llm.stream_structured_predict(Weather, prompt, city="Rome"))[-1], Weather)


report("llama-index-llms-openai-like", agent_streamed, agent, structured, structured_streamed)
