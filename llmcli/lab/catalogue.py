"""Every kind of problem by its name."""

from llmcli.errors import UsageError
from llmcli.lab.problem import Problem, ProblemKind
from llmcli.lab.problems import activations, basics, decode, products, rotary, rows

_KINDS = (*basics.KINDS, *rows.KINDS, *activations.KINDS, *rotary.KINDS, *products.KINDS, *decode.KINDS)
PROBLEMS: dict[str, ProblemKind] = {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: kind.name)}


def make_problem(name: str, sizes: dict[str, int]) -> Problem:
    """The problem of this name and these sizes. Raises: UsageError for an unknown name or wrong sizes"""
    if name not in PROBLEMS:
        raise UsageError(f"there is no problem {name!r}; there are {', '.join(PROBLEMS)}")
    try:
        return PROBLEMS[name].of_sizes(**sizes)
    except TypeError as error:
        raise UsageError(f"problem {name} has other sizes than {', '.join(sizes)}") from error
