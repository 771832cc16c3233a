"""How many threads compute a model."""

import torch

# Below this the threads wait for each other as long as they compute; with other programs running, ten times as long.
_LEAST_BYTES = 128 * 2**20
_ALL = torch.get_num_threads()


def set_threads(num_threads: int | None, weight_bytes: int) -> None:
    """Set torch's threads: `num_threads` if given, else one for a model of few weights and all for others.

    The number must not depend on how busy the machine is: float32 sums, and so texts, depend on it.
    """
    torch.set_num_threads(num_threads or (1 if weight_bytes < _LEAST_BYTES else _ALL))
