"""`--kernel NAME=FILE`: the user's own kernels in the model, once they have passed their reference checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llmcli.cli import lazy, shared
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.progress import say_compiling
from llmcli.cli.terminal import terminal
from llmcli.cli.units import first_of

_MOST_LISTED = 3

kernel_option = partial(
    shared.model_option,
    None,
    "Run the CUDA source FILE in place of kernel NAME, once it passes that kernel's checks; repeatable.",
    metavar="NAME=FILE",
    hidden=True,
)


def read_kernels(values: list[str] | None, devices: RunnerOptions) -> tuple[lazy.own_kernel.OwnKernel, ...]:
    """Parse the option's files; check that a card can run them.

    Raises: UsageError for a name or a file that cannot be, DeviceError without a card
    """
    if not values:
        return ()
    kernels = lazy.own_kernel.read_own_kernels(values)
    devices.require_card("--kernel is for models on a CUDA card")
    return kernels


def open_card(
    devices: RunnerOptions,
    kernels: Sequence[lazy.own_kernel.OwnKernel],
    model: lazy.model.Model,
    context: int,
    num_rows: int,
) -> RunnerOptions:
    """Open the card for these kernels, check them on it, and return the options with it.

    A line says how long each takes alone, next to ours.
    Raises: DeviceError for one that is wrong, KernelCompileError, UsageError for one that the model does not launch
    """
    if not kernels:
        return devices
    device = lazy.device.Device.open(devices.card or 0, own_sources={one.stem: one.text for one in kernels})
    device.activate()
    unchecked = lazy.kernel_checks.prepare_own_kernels(
        device,
        kernels,
        model,
        dtype=devices.dtype,
        kv_cache=devices.kv_cache,
        context=context,
        num_rows=min(num_rows, lazy.runners.MAX_ROWS),
        on_compile=say_compiling,
    )
    for kernel in kernels:
        terminal.info(f"checking {kernel}: {kernel.num_cases} cases")
        lazy.kernel_checks.check_own_kernel(device, kernel)
    if unchecked:
        terminal.warn(f"no check launches {first_of(unchecked, _MOST_LISTED, '; ')}, which the model may launch")
    for kernel in kernels:
        times = lazy.kernel_checks.time_own_kernel(device, kernel)
        own, engine = times.own.median, times.engine.median
        terminal.info(
            f"{kernel.stem} alone ({times.problem}): {1e6 * own:.2f} us, llmcli's {1e6 * engine:.2f} us, "
            f"{engine / own:.2f} times as fast"
        )
    return replace(devices, opened=device)


def opened_card(devices: RunnerOptions) -> lazy.device.Device:
    """The card that `open_card` has opened."""
    assert devices.opened is not None
    return devices.opened


def show_change(devices: RunnerOptions, runner: lazy.runners.Runner, num_tokens: int) -> None:
    """Measure a prompt of about this length and steps of decoding, with the user's kernels and ours, and say so.

    Raises: LLMCliError and its subclasses
    """
    if terminal.is_quiet:
        return
    change = lazy.bench.measure_change(runner, opened_card(devices).engine_kernels, num_tokens)
    if change is None:
        terminal.info("speed: the context has no room to measure it; llmcli bench with the same --kernel does")
        return
    for what, own, engine in (
        (f"a prompt of {change.num_tokens} tokens", change.own_prompt, change.engine_prompt),
        ("a step of decoding", change.own_step, change.engine_step),
    ):
        terminal.info(
            f"{what}: {_milliseconds(own)} with yours, {_milliseconds(engine)} with llmcli's kernels, "
            f"speed {change_text(own, engine)}"
        )


def speed_change(own: lazy.bench.Spread, engine: lazy.bench.Spread) -> float:
    """The user's speedup in the median run, as a share of our speed."""
    return engine.median / own.median - 1


def change_text(own: lazy.bench.Spread, engine: lazy.bench.Spread) -> str:
    """The same in per cent; in parentheses where it may be chance."""
    text = f"{speed_change(own, engine):+.1%}"
    return f"({text})" if own.overlaps(engine) else text


def _milliseconds(spread: lazy.bench.Spread) -> str:
    return f"{1e3 * spread.median:.3f} ms"
