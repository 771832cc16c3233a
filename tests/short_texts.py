"""`python -m short_texts ...` is `llmcli ...`, but a text without a limit of its own ends after 90 tokens."""

from typing import Any

from llmcli.__main__ import main
from llmcli.cli.session import Session

MOST_TOKENS = 90
usual_limit = Session.limit_new_tokens


def limit_new_tokens(session: Session, requested: int | None, *where: int, **how: Any) -> int | None:
    usual = usual_limit(session, requested, *where, **how)
    return usual if requested is not None else min(usual or MOST_TOKENS, MOST_TOKENS)


if __name__ == "__main__":
    Session.limit_new_tokens = limit_new_tokens  # type: ignore[method-assign]
    main()
