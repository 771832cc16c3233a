"""DSPy: a prediction with types, and its agent."""

from typing import Literal

import dspy
from harness import KEY, MODEL, QUESTION, URL, called, get_weather, report

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False))


class Sentiment(dspy.Signature):
    """Classify the sentiment of a sentence."""

    sentence: str = dspy.InputField()
    sentiment: Literal["positive", "negative", "neutral"] = dspy.OutputField()
    confidence: float = dspy.OutputField()


def typed() -> None:
    """Typed fields."""
    said = dspy.Predict(Sentiment)(sentence="This book was super fun to read.")
    assert said.sentiment in ("positive", "negative", "neutral")
    assert isinstance(said.confidence, float)


def chain_of_thought() -> None:
    """A field before the answer."""
    said = dspy.ChainOfThought("question -> answer: float")(question="Two dice are tossed. What is their sum?")
    assert isinstance(said.answer, float)


def react() -> None:
    """A tool, then an answer."""
    said = dspy.ReAct("question -> answer: str", tools=[get_weather], max_iters=2)(question=QUESTION)
    assert called
    assert isinstance(said.answer, str)


report("dspy", typed, chain_of_thought, react)
