"""What counts as one message: a line, or a block between triple quotes; and its prompts."""

QUOTES = '"""'
PROMPT = "> "  # before a typed message
CONTINUATION = ". "  # before the further lines of a block


def is_open_block(text: str) -> bool:
    """Whether a block was begun and not ended."""
    start = text.lstrip()
    return start.startswith(QUOTES) and not (len(start) >= 2 * len(QUOTES) and start.rstrip().endswith(QUOTES))


def unwrap(text: str) -> str:
    """The message: without a block's quotes and their line ends, or the white space around a message."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES)
        return text.removeprefix("\n").removesuffix("\n")
    return text
