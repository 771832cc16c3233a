"""Every kind of problem by its name."""

from llmcli.errors import UsageError
from llmcli.lab.problem import Problem, ProblemKind
from llmcli.lab.problems.int8_product import INT8_PRODUCT
from llmcli.lab.problems.launches import LAUNCHES
from llmcli.lab.problems.matmul import MATMUL
from llmcli.lab.problems.rms_norm import RMS_NORM

PROBLEMS: dict[str, ProblemKind] = {kind.name: kind for kind in (INT8_PRODUCT, LAUNCHES, MATMUL, RMS_NORM)}


def make_problem(name: str, sizes: dict[str, int]) -> Problem:
    """The problem of this name and these sizes.

    Raises: UsageError for a name or sizes that it does not have
    """
    if name not in PROBLEMS:
        raise UsageError(f"there is no problem {name!r}; there are {', '.join(PROBLEMS)}")
    try:
        return PROBLEMS[name].make(**sizes)
    except TypeError as error:
        raise UsageError(f"problem {name} has other sizes than {', '.join(sizes)}") from error
