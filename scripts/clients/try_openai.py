"""OpenAI's own client: its guides to function calling and to structured outputs."""

import json

import openai
from harness import MODEL, QUESTION, assert_answered, get_weather, report
from pydantic import BaseModel

client = openai.OpenAI()


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str


class CalendarEvent(BaseModel):
    """What is to come."""

    name: str
    date: str
    participants: list[str]


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]


def answer(message) -> None:
    """Call the tool as the message says, and ask for the answer."""
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages = [
        {"role": "user", "content": QUESTION},
        message,
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    whole = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert_answered(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"


def tools() -> None:
    """A tool's call, and the answer after it."""
    asked = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=TOOLS, tool_choice="auto"
    )
    assert asked.choices[0].finish_reason == "tool_calls"
    answer(asked.choices[0].message)


def tools_streamed() -> None:
    """The same as a stream, put together by the client."""
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert message.tool_calls[0].function.parsed_arguments.city
    answer(message)


def structured() -> None:
    """An answer in the form of a class."""
    event = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        response_format=CalendarEvent,
    )
    assert isinstance(event.choices[0].message.parsed, CalendarEvent)


def responses() -> None:
    """The same by the Responses API."""
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": GetWeather.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    }
    said = [{"role": "user", "content": QUESTION}]
    asked = client.responses.create(model=MODEL, input=said, tools=[tool])
    said += asked.output
    for item in asked.output:
        if item.type == "function_call":
            result = get_weather(**json.loads(item.arguments))
            said.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert_answered(client.responses.create(model=MODEL, input=said, tools=[tool]).output_text)


def responses_streamed() -> None:
    """A stream of the Responses API."""
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert QUESTION in text == stream.get_final_response().output_text


def responses_structured() -> None:
    """An answer of the Responses API in the form of a class."""
    event = client.responses.parse(
        model=MODEL, input="Alice and Bob are going to a science fair on Friday.", text_format=CalendarEvent
    )
    assert isinstance(event.output_parsed, CalendarEvent)


report("openai", tools, tools_streamed, structured, responses, responses_streamed, responses_structured)
