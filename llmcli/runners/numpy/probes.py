"""`NumpyProbes`: the products of the numpy runner, to be timed."""

from collections.abc import Callable, Sequence

import numpy as np

from llmcli.runners.host.predict import Form


class NumpyProbes:
    """The `HostProbes` of the numpy runner."""

    dtype = "float32"
    num_threads = 1

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over `num_bytes` bytes."""
        memory = np.ones(num_bytes // 4, np.float32)
        return lambda: memory @ memory

    def multiply(self, form: Form, shape: tuple[int, int], chunks: Sequence[int]) -> Callable[[], object]:
        """Products of chunks with a random weight; all are held as floats, so `form` is None."""
        weight = np.random.default_rng(0).random(shape, np.float32)
        xs = [np.ones((num_tokens, shape[1]), np.float32) for num_tokens in chunks]
        return lambda: [x @ weight.T for x in xs]
