"""Sizes, times and rates as people read them."""


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


def rate(per_second: float) -> str:
    """A rate; a slow one keeps two digits."""
    return f"{per_second:,.1f}" if per_second >= 1 else f"{per_second:.2g}"
