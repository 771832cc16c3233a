"""Instructor: its README's example, in its default mode, also in parts and as a list."""

import instructor
from harness import MODEL, report
from pydantic import BaseModel, Field

client = instructor.from_provider(f"openai/{MODEL}")
MESSAGES = [{"role": "user", "content": "John is 25 years old, and Jane is 30 years old"}]


class User(BaseModel):
    """A user."""

    name: str
    age: int = Field(ge=0)
    email: str | None = None


def structured() -> None:
    """An object."""
    user = client.chat.completions.create(response_model=User, messages=MESSAGES, max_retries=0)
    assert isinstance(user, User)


def partial() -> None:
    """An object that grows, by a stream."""
    users = list(client.chat.completions.create_partial(response_model=User, messages=MESSAGES, max_retries=0))
    assert len(users) > 1
    User.model_validate(users[-1].model_dump())


def iterable() -> None:
    """Several objects, by a stream."""
    users = list(client.chat.completions.create_iterable(response_model=User, messages=MESSAGES, max_retries=0))
    assert users
    assert all(isinstance(user, User) for user in users)


report("instructor", structured, partial, iterable)
