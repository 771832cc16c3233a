"""LangChain's client for OpenAI: tools, structured output, and an agent with both."""

from harness import MODEL, QUESTION, assert_answered, called, get_weather, report
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL)


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: float


def bind_tools() -> None:
    """A call of a tool."""
    (call,) = model.bind_tools([get_weather]).invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)


def bind_tools_streamed() -> None:
    """The same as a stream."""
    first, *rest = model.bind_tools([get_weather]).stream(QUESTION)
    for piece in rest:
        first += piece
    (call,) = first.tool_calls
    assert isinstance(call["args"]["city"], str)


def structured() -> None:
    """An object."""
    assert isinstance(model.with_structured_output(Weather).invoke("22 degrees in Rome"), Weather)


def structured_by_call() -> None:
    """An object by a call."""
    by_call = model.with_structured_output(Weather, method="function_calling")
    assert isinstance(by_call.invoke("22 degrees in Rome"), Weather)


def agent() -> None:
    """A tool, then an answer."""
    result = create_agent(model, tools=[get_weather]).invoke({"messages": [("user", QUESTION)]})
    assert_answered(result["messages"][-1].content)


def agent_structured() -> None:
    """A tool, then an object."""
    one = create_agent(model, tools=[get_weather], response_format=Weather)
    assert isinstance(one.invoke({"messages": [("user", QUESTION)]})["structured_response"], Weather)
    assert len(called) == 1


report("langchain-openai", bind_tools, bind_tools_streamed, structured, structured_by_call, agent, agent_structured)
