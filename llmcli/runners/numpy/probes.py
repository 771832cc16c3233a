"""`NumpyProbes`: the products of the numpy runner, to be timed."""

from collections.abc import Callable

import numpy as np

from llmcli.runners.host.predict import Form


class NumpyProbes:
    """The `HostProbes` of the numpy runner."""

    dtype = "float32"
    num_threads = 1

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over so many bytes."""
        memory = np.ones(num_bytes // 4, np.float32)
        return lambda: memory @ memory

    def multiply(self, form: Form, shape: tuple[int, int], num_tokens: int) -> Callable[[], object]:
        """A product of so many tokens with a random weight; all are held as floats, so `form` is None."""
        weight = np.random.default_rng(0).random(shape, np.float32)
        x = np.ones((num_tokens, shape[1]), np.float32)
        return lambda: x @ weight.T
