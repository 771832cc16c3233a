"""Python's garbage collector, kept from what stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS_BETWEEN_LOOKS = 50_000  # usually 700


@contextmanager
def loaded_objects_set_aside() -> Iterator[None]:
    """Keep the collector from all that has been loaded, and let it look at the rest rarely.

    For the process that runs many rows: a step makes thousands of objects that end with it or with the next, without
    the collector. And for the one that talks with clients: all wait while the collector looks, which takes a third of
    a second with all modules.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
