"""smolagents: both of its agents."""

from harness import KEY, MODEL, QUESTION, URL, assert_answered, get_weather, report
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


def agent(kind: type, **keys):
    """An agent with the tool."""
    model = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY)
    return kind(tools=[tool(get_weather)], model=model, max_steps=3, verbosity_level=LogLevel.OFF, **keys)


def tools() -> None:
    """Calls of the tool, then of `final_answer`."""
    result = agent(ToolCallingAgent, return_full_result=True).run(QUESTION)
    assert result.state == "success", result.output
    assert_answered("22 degrees")


def tools_streamed() -> None:
    """The same as a stream."""
    result = agent(ToolCallingAgent, stream_outputs=True, return_full_result=True).run(QUESTION)
    assert result.state == "success", result.output
    assert_answered("22 degrees")


def code() -> None:
    """Code that calls the tool and then `final_answer`."""
    result = agent(CodeAgent, return_full_result=True).run(QUESTION)
    assert result.state == "success", result.output
    assert_answered(result.output)


def code_streamed() -> None:
    """The same as a stream."""
    result = agent(CodeAgent, stream_outputs=True, return_full_result=True).run(QUESTION)
    assert result.state == "success", result.output
    assert_answered(result.output)


report("smolagents", tools, tools_streamed, code, code_streamed)
