"""Sizes, times, rates, divergences, counts and lists as people read them."""

from collections.abc import Sequence
from decimal import Decimal

_LEAST_DIVERGENCE = 1e-6  # in nats; below it is only rounding


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.2f} GiB"


def duration(seconds: float) -> str:
    """A time in the unit that fits."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def estimated_duration(seconds: float) -> str:
    """An estimated time, in whole seconds or more."""
    if seconds < 1:
        return "less than a second"
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {duration(seconds)}"


def divergence(nats: float, digits: int = 3) -> str:
    """A KL divergence, never with an exponent."""
    if 0 < abs(nats) < _LEAST_DIVERGENCE:
        return f"under {Decimal(str(_LEAST_DIVERGENCE)):f}"
    return f"{Decimal(f'{nats:.{digits}g}'):f}"


def rate(per_second: float) -> str:
    """A rate; a slow one keeps two digits."""
    return f"{per_second:,.1f}" if per_second >= 1 else f"{per_second:.2g}"


def counted(count: int, what: str) -> str:
    """`1 turn`, or `2 turns`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def first_of(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(names[:most])}{more}"
