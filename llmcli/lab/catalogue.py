"""Every kind of problem by its name."""

from llmcli.errors import UsageError
from llmcli.lab.problem import Problem, ProblemKind
from llmcli.lab.problems.activations import GELU, SILU, SWIGLU
from llmcli.lab.problems.bias_gelu import BIAS_GELU
from llmcli.lab.problems.copy import COPY
from llmcli.lab.problems.decode_attention import DECODE_ATTENTION
from llmcli.lab.problems.decode_cache import DECODE_CACHE
from llmcli.lab.problems.decode_mlp import DECODE_MLP
from llmcli.lab.problems.gemv import GEMV
from llmcli.lab.problems.gemv_codes import GEMV_INT4, GEMV_INT8
from llmcli.lab.problems.int8_product import INT8_PRODUCT
from llmcli.lab.problems.laplacian import LAPLACIAN
from llmcli.lab.problems.launches import LAUNCHES
from llmcli.lab.problems.layer_norm import LAYER_NORM
from llmcli.lab.problems.masked_softmax import MASKED_SOFTMAX
from llmcli.lab.problems.matmul import MATMUL
from llmcli.lab.problems.relaxation import BRANCHES, UNEVEN_LOOPS
from llmcli.lab.problems.rms_norm import RMS_NORM
from llmcli.lab.problems.rotary import ROTARY_ADJACENT, ROTARY_HALF, ROTARY_TWO_PARTS
from llmcli.lab.problems.row_sum import ROW_SUM
from llmcli.lab.problems.softmax import SOFTMAX
from llmcli.lab.problems.top1 import TOP1
from llmcli.lab.problems.transpose import TRANSPOSE

_KINDS = (
    BIAS_GELU,
    BRANCHES,
    COPY,
    DECODE_ATTENTION,
    DECODE_CACHE,
    DECODE_MLP,
    GELU,
    GEMV,
    GEMV_INT4,
    GEMV_INT8,
    INT8_PRODUCT,
    LAPLACIAN,
    LAUNCHES,
    LAYER_NORM,
    MASKED_SOFTMAX,
    MATMUL,
    RMS_NORM,
    ROTARY_ADJACENT,
    ROTARY_HALF,
    ROTARY_TWO_PARTS,
    ROW_SUM,
    SILU,
    SOFTMAX,
    SWIGLU,
    TOP1,
    TRANSPOSE,
    UNEVEN_LOOPS,
)
PROBLEMS: dict[str, ProblemKind] = {kind.name: kind for kind in _KINDS}


def make_problem(name: str, sizes: dict[str, int]) -> Problem:
    """The problem of this name and these sizes.

    Raises: UsageError for an unknown name or wrong sizes
    """
    if name not in PROBLEMS:
        raise UsageError(f"there is no problem {name!r}; there are {', '.join(PROBLEMS)}")
    try:
        return PROBLEMS[name].make(**sizes)
    except TypeError as error:
        raise UsageError(f"problem {name} has other sizes than {', '.join(sizes)}") from error
