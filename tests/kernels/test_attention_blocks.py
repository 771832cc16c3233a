"""attention_decode gives the same bits however many splits of a row a block takes; emulated on the CPU."""

import numpy as np
import pytest
from emulated import COMPILER, EmulatedDevice, can_emulate, solve

from llmcli.kernels.qkv import QkvLayout
from llmcli.lab.attention import new_tokens
from llmcli.lab.cases.attention import decode_case
from llmcli.lab.problem import find_mismatch

pytestmark = pytest.mark.skipif(not can_emulate(), reason=f"no {COMPILER} that knows _Float16 and ucontext.h")

# Multiprocessors: so few that a block takes one split of a row, then one, two, three and seven blocks for each head.
MULTIPROCESSORS = (1, 4, 8, 12, 28)
# Two rows each, of one to seven splits of 128 tokens, then of seven longer ones; and a window.
POSITIONS = (((5, 200), None), ((383, 384), None), ((385, 513), None), ((640, 897), None), ((1300, 500), 700))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("blocks"))


def test_bits_do_not_depend_on_the_splits_of_a_block(emulated: EmulatedDevice) -> None:
    """Threads and blocks run in another order each time."""
    problems = [
        decode_case(new_tokens(QkvLayout(4, 2, 8), np.dtype(np.float16), list(positions), window=window, num_splits=7))
        for positions, window in POSITIONS
    ]
    for emulated.num_multiprocessors in (MULTIPROCESSORS[0], MULTIPROCESSORS[-1]):
        emulated.compile_for(problems[:1])
    for problem, (positions, _) in zip(problems, POSITIONS, strict=True):
        found = []
        for emulated.num_multiprocessors in MULTIPROCESSORS:
            emulated.seed += 1
            found.append(solve(emulated, problem))
            assert find_mismatch(problem, found[-1]) is None, (positions, emulated.num_multiprocessors)
        assert all(other["out"].tobytes() == found[0]["out"].tobytes() for other in found), positions
