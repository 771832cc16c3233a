"""While many rows run, Python's collector skips what was loaded before; afterwards it checks everything again."""

import gc
import weakref
from contextlib import suppress

from llmcli.cli.run import loaded_objects_set_aside


class Ring:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_loaded_is_passed_by_and_no_garbage_is_kept() -> None:
    unused = weakref.ref(Ring())
    loaded = Ring()
    with loaded_objects_set_aside():
        assert unused() is None
        later = weakref.ref(Ring())
        assert all(one is not loaded for one in gc.get_objects())
        gc.collect()
        assert later() is None
    assert any(one is loaded for one in gc.get_objects())


def test_an_interrupt_ends_it() -> None:
    usual = gc.get_threshold()
    with suppress(KeyboardInterrupt), loaded_objects_set_aside():
        assert gc.get_threshold() > usual
        raise KeyboardInterrupt
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, usual)
