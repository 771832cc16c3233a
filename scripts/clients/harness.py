"""What the programs of this folder share: the server's address, a tool, and the report.

Each program is one client's own example. `scripts/check_clients.py` runs them, with a Python that has the clients.
"""

import json
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version

URL, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["MODEL"]
KEY = os.environ["OPENAI_API_KEY"]
QUESTION = "What is the weather in Rome?"
called: list[str] = []  # the cities that the tool was asked for


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: the name of the city
    """
    called.append(city)
    return "22 degrees"


def assert_answered(text: str) -> None:
    """Check that the tool was called, once, and that the answer has what it said."""
    (city,) = called
    assert isinstance(city, str), city
    assert "22 degrees" in text, text


def report(package: str, *checks: Callable[[], object]) -> None:
    """Run the checks; print their outcome as JSON."""
    results = {}
    for check in checks:
        called.clear()
        try:
            check()
            results[check.__name__] = "passed"
        except Exception as error:
            results[check.__name__] = f"failed: {type(error).__name__}: {error}"[:500]
            traceback.print_exc()
    print("\n" + json.dumps({"package": package, "version": version(package), "results": results}))
