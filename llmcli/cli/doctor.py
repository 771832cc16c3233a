"""`llmcli doctor`: is this machine ready? `llmcli verify`: does its card compute what it should?

Kernels, layers and logits are compared with references.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import typer

from llmcli.cli import lazy, shared
from llmcli.cli.command import option
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.progress import progress, say_compiling
from llmcli.cli.session import Session, open_session
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.errors import DeviceError, UsageError

_TEXT = (
    "On the first morning of spring the miller opened the door and found a small grey cat asleep on a sack of flour. "
    'He asked: "Where do you come from?" The cat looked at him with 2 green eyes, yawned, and went in. By noon it had '
    "caught 13 mice; by evening it knew every room, every stair and the 1 warm place beside the oven. "
)


def doctor(
    json_: bool = option(False, "Print a JSON array instead of a table."),
    debug: bool = shared.debug_option(),
) -> None:
    """Check this machine and say how to fix what is wrong.

    It looks at Python, libraries, driver, GPU, compiler, caches and disk. The exit code is 4 if something is broken. A
    machine without a GPU is not broken.

    Examples:

    llmcli doctor

    llmcli doctor --json
    """
    checks = lazy.doctor.examine()
    if json_:
        terminal.write_json([dataclasses.asdict(check) for check in checks])
    else:
        marks = {"ok": "ok", "absent": "--", "problem": "!!"}
        for check in checks:
            lines = [(f"{marks[check.state]}  {check.name}", check.detail)]
            if check.fix:
                lines.append(("", f"fix: {check.fix}"))
            terminal.write(fact_lines(lines, 19, sys.stdout))
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(DeviceError.exit_code)


def verify(
    *,
    names: shared.ModelNames,
    tokens: int = option(32, "Tokens to run through the model.", min=2),
    device: str = shared.device_option(),
    json_: bool = option(False, "Print one JSON object instead of lines."),
    messages: shared.MessageOptions,
) -> None:
    """Check that this machine's card computes what it should.

    Every kernel runs on small and odd inputs and is compared with a float64 reference, every element within a bound
    from the theory. Then the first tokens of a text run through the model on the card and, in float32, on the CPU. What
    every layer adds is compared, and all logits. The exit code is 4 if anything is wrong.

    Examples:

    llmcli verify my-model

    llmcli verify my-model --tokens 200 --json
    """
    card = RunnerOptions(device, shared.AUTO, None).require_card("verify compares a card with the CPU")
    session = open_session(names.chosen)
    token_ids = _token_ids(session, tokens)
    opened = lazy.device.Device.open(card)
    opened.activate()
    if not json_:
        terminal.write(f"{opened.name}, {opened.arch}\n")
    verdicts = []
    for verdict in lazy.kernel_checks.verify_kernels(opened, say_compiling):
        verdicts.append(verdict)
        if not json_:
            terminal.write(_kernel_line(verdict))
    layers, logits = _compare(session, card, token_ids)
    first_wrong = next((layer for layer in layers if not layer.is_right), None)
    is_right = logits.is_right and first_wrong is None and not any(verdict.num_wrong for verdict in verdicts)
    if json_:
        first_name = None if first_wrong is None else first_wrong.module
        terminal.write_json(_as_json(session.name, opened, verdicts, layers, first_name, logits, is_right))
    else:
        _show_comparison(session.name, layers, first_wrong, logits)
    if not is_right:
        raise typer.Exit(DeviceError.exit_code)


def _token_ids(session: Session, count: int) -> tuple[int, ...]:
    longest = session.model.config.max_position_embeddings
    if count > longest:
        raise UsageError(f"--tokens is {count}, and the context limit of {session.name} is {longest} tokens")
    text = _TEXT
    while len(token_ids := session.encode_prompt(text).token_ids) < count:
        text += text
    return token_ids[:count]


def _compare(
    session: Session, card: int, token_ids: tuple[int, ...]
) -> tuple[list[lazy.verify.LayerVerdict], lazy.verify.LogitsVerdict]:
    """The model on the card in its own precision, and on the CPU in float32, both with the stored weights."""
    runner = session.load_runner(RunnerOptions(f"cuda:{card}", shared.AUTO, None), len(token_ids))[0]
    reference = session.load_runner(RunnerOptions("cpu", "float32", None), len(token_ids))[0]
    terminal.info(f"{session.name}: {runner.description} against {reference.description}")
    with progress("comparing layers and logits", "passes") as on_progress:
        on_progress(0, 2)
        layers = lazy.verify.compare_layers(runner, reference, token_ids)
        on_progress(1, 2)
        return layers, lazy.verify.compare_logits(runner, reference, token_ids)


def _as_json(
    model: str,
    opened: lazy.device.Device,
    verdicts: list[lazy.kernel_checks.KernelVerdict],
    layers: list[lazy.verify.LayerVerdict],
    first_wrong: str | None,
    logits: lazy.verify.LogitsVerdict,
    is_right: bool,
) -> dict[str, object]:
    return {
        "model": model,
        "device": opened.name,
        "arch": opened.arch,
        "is_right": is_right,
        "kernels": [
            {**dataclasses.asdict(one), "largest": _finite(one.largest), "is_right": not one.num_wrong}
            for one in verdicts
        ],
        "layers": [
            {
                **dataclasses.asdict(one),
                **{name: _finite(getattr(one, name)) for name in ("largest", "actual", "expected", "part_of_bound")},
                "is_right": one.is_right,
            }
            for one in layers
        ],
        "first_wrong_layer": first_wrong,
        "logits": {
            **dataclasses.asdict(logits),
            "largest": _finite(logits.largest),
            "part_of_bound": _finite(logits.part_of_bound),
            "is_right": logits.is_right,
        },
    }


def _kernel_line(verdict: lazy.kernel_checks.KernelVerdict) -> str:
    if verdict.num_wrong:
        result = f"WRONG in {verdict.num_wrong}: {verdict.fault}"
    elif verdict.largest == 0:
        result = "exact             ok"
    else:
        result = f"{verdict.largest:4.2f} of its bound  ok"
    return f"{verdict.kernel:<18} {verdict.num_cases:>4} cases  {result}\n"


def _show_comparison(
    name: str,
    layers: list[lazy.verify.LayerVerdict],
    first_wrong: lazy.verify.LayerVerdict | None,
    logits: lazy.verify.LogitsVerdict,
) -> None:
    alone = logits.num_tokens - logits.num_prompt_tokens
    passes = f"{logits.num_prompt_tokens} tokens together, {alone} one by one"
    terminal.write(
        f"what each layer of {name} adds ({passes}): the largest error of an element as a part of its scale\n",
        wraps=True,
    )
    for layer in layers:
        result = "exact             " if layer.largest == 0 else f"{layer.part_of_bound:4.2f} of its bound  "
        verdict = "ok" if layer.is_right else "WRONG"
        terminal.write(f"{layer.module:<18} {layer.largest:>10.2g}  {result}{verdict}\n")
    if first_wrong is not None:
        terminal.write(
            f"{first_wrong.module} is the first that is wrong: behind it element {first_wrong.element} at position "
            f"{first_wrong.position} is {first_wrong.actual:.6g}, expected {first_wrong.expected:.6g}\n",
            wraps=True,
        )
    terminal.write(
        f"logits of {name} ({passes}): the largest difference is "
        f"{logits.largest:.3g} at position {logits.position}, token {logits.token_id}, where logits have a standard "
        f"deviation of {logits.spread:.3g}; {logits.part_of_bound:.2f} of its bound  "
        f"{'ok' if logits.is_right else 'WRONG'}\n"
        f"the likeliest token is the same at {logits.num_same_choices} of {logits.num_tokens} positions\n",
        wraps=True,
    )


def _finite(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None
