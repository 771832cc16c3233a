"""Starts driver and card before they are needed. It reports no errors: opening the card does."""

import ctypes
import importlib.util
from threading import Thread

from llmcli.kernels import environment
from llmcli.timeline import Timeline


def start_card(index: int, timeline: Timeline) -> Thread | None:
    """Prepare card `index` in its own thread, which takes CUDA some tenths of a second; None without CuPy.

    Meanwhile Python can import and read files. What fails here fails again, with a message, when the card is opened.
    """
    if importlib.util.find_spec("cupy") is None:
        return None
    thread = Thread(target=_start, args=(index, timeline), name="start card")
    thread.start()
    return thread


def _start(index: int, timeline: Timeline) -> None:
    """Make the context that everything on the card shares. Calls by ctypes let Python run meanwhile."""
    with timeline.beside("driver and context"):
        try:
            driver = ctypes.CDLL(environment.DRIVER_LIBRARY)
        except OSError:
            return
        card, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
