"""Starts driver and card before they are needed. Asks nothing and tells nothing: whoever opens the card does that."""

import ctypes
import importlib.util
from threading import Thread

from llmcli.kernels import environment
from llmcli.timeline import Timeline


def start_card(index: int, timeline: Timeline) -> Thread | None:
    """Make card `index` ready in a thread of its own, which takes CUDA some tenths of a second; None without CuPy.

    In that time Python can import and read files. What fails here fails again, and is told, when the card is opened.
    """
    if importlib.util.find_spec("cupy") is None:
        return None
    thread = Thread(target=_start, args=(index, timeline), name="start card")
    thread.start()
    return thread


def _start(index: int, timeline: Timeline) -> None:
    """Make the context that everything on the card shares. Calls by ctypes let Python go on meanwhile."""
    with timeline.beside("driver and context"):
        try:
            driver = ctypes.CDLL(environment.DRIVER_LIBRARY)
        except OSError:
            return
        card, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(card), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
