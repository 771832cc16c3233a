"""`/probs`: how likely the model finds each token of the last answer, and what else it thought of."""

from __future__ import annotations

import math
import sys

from rich.cells import cell_len

from llmcli.cli.chat_session.outcome import Outcome
from llmcli.cli.chat_session.state import ChatSession
from llmcli.cli.output.color import terminal_tints, tinted
from llmcli.cli.output.tokens import as_many_as_fit, level_names, likelihood_level, percent, show_piece
from llmcli.cli.terminal import columns_of, has_color, terminal, visible
from llmcli.errors import UsageError
from llmcli.tokenizer.base import StreamDecoder

NUM_SHOWN = 10  # of the least likely tokens
NUM_ALTERNATIVES = 4


def probs(state: ChatSession, argument: str) -> Outcome:
    """Show the last answer tinted by probability, and its least likely tokens with the likeliest in their place.

    The model runs over the answer once more; the probabilities are its own, before any sampling parameter.
    Raises: UsageError if there is no answer, or for anything but a number of tokens.
    """
    if argument and not (argument.isascii() and argument.isdecimal()):
        raise UsageError("/probs takes the number of tokens to list, such as /probs 20")
    num_shown = int(argument[:9]) if argument else NUM_SHOWN
    tokenizer = state.session.tokenizer
    known = list(state.chat.logprobs(NUM_ALTERNATIVES))
    probabilities = [math.exp(chosen.logprob) for chosen, _ in known]
    if has_color(sys.stderr):
        _show_tinted(state, probabilities)

    rows = [("#", "token", "model", ["likeliest"])]
    least = sorted(range(len(known)), key=lambda index: probabilities[index])[:num_shown]
    for index in sorted(least):
        chosen, alternatives = known[index]
        likeliest = [f"{show_piece(tokenizer, one.token_id)} {percent(math.exp(one.logprob))}" for one in alternatives]
        piece = show_piece(tokenizer, chosen.token_id)
        rows.append((str(index + 1), piece, percent(probabilities[index]), likeliest))
    widths = [max(cell_len(str(row[column])) for row in rows) for column in range(3)]
    room = columns_of(sys.stderr) - sum(widths) - 2 * len(widths)
    for number, piece, probability, likeliest_tokens in rows:
        space = " " * (widths[1] - cell_len(piece))
        shown = as_many_as_fit(likeliest_tokens, room)
        terminal.show(f"{number:>{widths[0]}}  {piece}{space}  {probability:>{widths[2]}}  {shown}\n")
    if len(least) < len(known):
        terminal.info(f"the {len(least)} least likely of {len(known)} tokens; /probs N lists more")
    return Outcome()


def _show_tinted(state: ChatSession, probabilities: list[float]) -> None:
    tints = terminal_tints()
    names = " · ".join(tinted(name, tint) for name, tint in zip(level_names(), tints, strict=True))
    terminal.info(f"probability of each token: {names}", is_drawn=True)
    answer = state.chat.conversation.last.answer
    assert answer is not None
    decoder = StreamDecoder(state.session.tokenizer, at_start=True)
    for token_id, probability in zip(answer.token_ids, probabilities, strict=True):
        text = tinted(visible(decoder.push(token_id)), tints[likelihood_level(probability)])
        terminal.show(text, is_drawn=True, wraps=True)
    terminal.show(f"{visible(decoder.flush())}\n\n", is_drawn=True)
