"""LiteLLM: its examples of function calling and of JSON by a class."""

import json

import litellm
from harness import KEY, MODEL, QUESTION, URL, assert_answered, get_weather, report
from pydantic import BaseModel

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    temperature: float


def complete(messages, **keys):
    """One completion."""
    return litellm.completion(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, messages=messages, **keys)


def answer(message) -> None:
    """Call the tool as the message says, and ask for the answer."""
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    results = [{"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result}]
    assert_answered(complete([*ASKED, message, *results], tools=[TOOL]).choices[0].message.content)


def tools() -> None:
    """A tool, then an answer."""
    answer(complete(ASKED, tools=[TOOL], tool_choice="auto").choices[0].message)


def tools_streamed() -> None:
    """The same by a stream."""
    pieces = list(complete(ASKED, tools=[TOOL], stream=True))
    answer(litellm.stream_chunk_builder(pieces, messages=ASKED).choices[0].message)


def structured() -> None:
    """An object."""
    Weather.model_validate_json(complete(ASKED, response_format=Weather).choices[0].message.content)


report("litellm", tools, tools_streamed, structured)
