"""Every kind of problem by its name."""

from llmcli.errors import UsageError
from llmcli.lab.problem import Problem, ProblemKind
from llmcli.lab.problems.bias_gelu import BIAS_GELU
from llmcli.lab.problems.decode_mlp import DECODE_MLP
from llmcli.lab.problems.gemv import GEMV
from llmcli.lab.problems.gemv_codes import GEMV_INT4, GEMV_INT8
from llmcli.lab.problems.int8_product import INT8_PRODUCT
from llmcli.lab.problems.launches import LAUNCHES
from llmcli.lab.problems.masked_softmax import MASKED_SOFTMAX
from llmcli.lab.problems.matmul import MATMUL
from llmcli.lab.problems.rms_norm import RMS_NORM
from llmcli.lab.problems.rotary import ROTARY_ADJACENT, ROTARY_HALF, ROTARY_TWO_PARTS
from llmcli.lab.problems.swiglu import SWIGLU

PROBLEMS: dict[str, ProblemKind] = {
    kind.name: kind
    for kind in (
        BIAS_GELU,
        DECODE_MLP,
        GEMV,
        GEMV_INT4,
        GEMV_INT8,
        INT8_PRODUCT,
        LAUNCHES,
        MASKED_SOFTMAX,
        MATMUL,
        RMS_NORM,
        ROTARY_ADJACENT,
        ROTARY_HALF,
        ROTARY_TWO_PARTS,
        SWIGLU,
    )
}


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
