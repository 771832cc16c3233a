"""Values as arrays store them: float32, float16, and bfloat16 in uint16."""

from typing import Any

import numpy as np

STORAGE: tuple[Any, ...] = (np.float32, np.float16, np.uint16)
STORAGE_NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}
EPSILON = 2.0**-24  # unit roundoff of fp32 arithmetic


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite values rounded to nearest even bfloat16, as uint16."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_storage(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values rounded to a storage type; uint16 means bfloat16."""
    return to_bfloat16(values) if np.dtype(dtype) == np.uint16 else values.astype(dtype)


def storage_name(dtype: Any) -> str:
    """What a storage type is called."""
    return STORAGE_NAMES[np.dtype(dtype)]
