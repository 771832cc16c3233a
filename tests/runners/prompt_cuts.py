"""Where the CUDA runner cuts and shares prompts: at every page. Chunks have CHUNK tokens.

Classes for those of the conformance suite, whose `load` asks for such chunks.
"""

from row_steps import PROMPT, start

from llmcli.runners.base import PAGE_TOKENS, Runner, Span

CHUNK = 128
COMMON = 100  # tokens that another prompt has in common with this one


def span_ends(runner: Runner) -> list[int]:
    """Where the spans of the prompt end, if as few tokens as possible are asked for."""
    row, ends = runner.open(PROMPT), [0]
    runner.keep(row, 0)
    while ends[-1] < len(PROMPT):
        ends.append(runner.span_end(row, 1))
        runner.queue([Span(row, tuple(PROMPT[ends[-2] : ends[-1]]), "none")])
    return ends[1:]


def num_shared(runner: Runner, num_common: int) -> int:
    """The tokens that a prompt finds of another one with the same first `num_common` tokens."""
    start(runner, PROMPT, None)
    other = runner.open([*PROMPT[:num_common], *reversed(PROMPT[num_common:])])
    return runner.num_tokens(other)


class CutAtPages:
    """For runners whose products give a token the same bits among any number of others."""

    def test_prompts_are_cut_at_every_page(self, runner: Runner) -> None:
        assert span_ends(runner) == [*range(PAGE_TOKENS, len(PROMPT), PAGE_TOKENS), len(PROMPT)]

    def test_prompts_are_shared_up_to_any_page(self, runner: Runner) -> None:
        assert num_shared(runner, COMMON) == COMMON // PAGE_TOKENS * PAGE_TOKENS
