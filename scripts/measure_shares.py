"""Measures what each kernel reaches on this card, for the tables in llmcli/runners/cuda/predict/predictor.py.

    python -m scripts.measure_shares MODEL ...

The kernels of steps of 1 to 256 rows and of prompts of 12 to 2,048 tokens are timed as `llmcli kernels bench` does it.
For each kernel that ran, the script prints the entry of the table that predicts these times best, how many times it
had, and the largest error. MODEL is a folder; take one of each format.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llmcli.cli.kernels_bench import measure_subject_kernels
from llmcli.cli.targets import open_subject
from llmcli.kernels.launches import CardFacts
from llmcli.lab.roofline import TimedStep
from llmcli.lab.walk import Lengths
from llmcli.runners.cuda.predict.predictor import Demand, Rates, Shares, demand_of

# Rows of a step, and tokens of a prompt.
SIZES = ((1, 12), (8, 64), (32, 128), (64, 512), (256, 2048))
DEPTH = 512
SHARES = np.geomspace(1, 0.02, 120).round(3)  # the best first: where others predict as well, it is taken
STEP_MICROSECONDS, MOST_MICROSECONDS = 0.1, 20.0

Measured = Mapping[str, Sequence[tuple[Demand, float]]]  # by entry of the table: what a launch asks, and its seconds


def times_of(steps: Iterable[TimedStep], rates: Rates, card: CardFacts) -> Measured:
    """The measured times of launches, by the entry of the table that prices them."""
    found: dict[str, list[tuple[Demand, float]]] = {}
    for step in steps:
        for call, times in zip(step.walk.calls, step.calls, strict=True):
            asked = demand_of(call.launch, rates, card)
            found.setdefault(asked.entry, []).append((asked, times.median))
    return found


def fit(times: Sequence[tuple[Demand, float]]) -> tuple[Shares, float]:
    """The shares with the least squares of relative errors, and the largest error."""
    moving, multiplying, seconds = (
        np.array(values)
        for values in zip(*((asked.moving, asked.multiplying, took) for asked, took in times), strict=True)
    )
    reading = moving / SHARES[:, None, None]
    computing = multiplying / SHARES[None, :, None]
    longest = np.maximum(reading, computing)  # [reading share, multiplying share, time]
    best, found = np.inf, (Shares(1.0, 1.0, 0.0), 0.0)
    for microseconds in np.arange(0, MOST_MICROSECONDS, STEP_MICROSECONDS).round(1):
        errors = (longest + 1e-6 * microseconds) / seconds - 1
        squares = (errors**2).sum(axis=-1)
        place = np.unravel_index(squares.argmin(), squares.shape)
        if squares[place] < best:
            best = squares[place]
            shares = Shares(float(SHARES[place[0]]), float(SHARES[place[1]]), float(microseconds))
            found = shares, float(np.abs(errors[place]).max())
    return found


def table(times: Measured) -> str:
    """The entries as they stand in pricing.py."""
    lines = []
    for entry, of_entry in sorted(times.items()):
        shares, error = fit(of_entry)
        values = ", ".join(f"{value:g}" for value in shares)
        lines.append(f'    "{entry}": Shares({values}),  # {len(of_entry)} times, within {error:.0%}\n')
    return "".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    found: dict[str, list[tuple[Demand, float]]] = {}
    for name in parser.parse_args().models:
        subject = open_subject(name, None)
        for rows, prompt in SIZES:
            lengths = Lengths.within(subject.model.config.max_position_embeddings, prompt, DEPTH, rows)
            device, ceilings, steps = measure_subject_kernels(subject, lengths, None)
            rates = Rates(ceilings.read_bytes, ceilings.flops)
            for entry, times in times_of(steps, rates, device.facts).items():
                found.setdefault(entry, []).extend(times)
    print(table(found), end="")


if __name__ == "__main__":
    main()
