"""Decoding on the CPU by programs side by side: what each gets, and what all get together.

    python -m scripts.benchmark_side_by_side [MODEL] [--programs N...] [--tokens N] [--default]

Each program is `llmcli generate` with a seed of its own. With --default OpenMP's own waiting and a thread a core are
measured, as without llmcli's choices.
"""

import argparse
import os
import re
import subprocess
import sys


def rates(model: str | None, num_programs: int, num_tokens: int, is_default: bool) -> list[float]:
    """The tokens/s of each."""
    command = [sys.executable, "-m", "llmcli", "generate", "Once upon a time", "--device", "cpu", "--stats"]
    command += ["--max-new-tokens", str(num_tokens), *(("--model", model) if model else ())]
    environment = dict(os.environ)
    if is_default:
        environment["GOMP_SPINCOUNT"] = "300000"  # OpenMP's default
        command += ["--threads", str(os.cpu_count())]
    programs = [
        subprocess.Popen(
            [*command, "--seed", str(seed)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(num_programs)
    ]
    found = []
    for program in programs:
        _, told = program.communicate()
        match = re.search(r"^decode +([\d.,]+) tokens/s", told, re.MULTILINE)
        if program.returncode != 0 or match is None:
            raise SystemExit(told)
        found.append(float(match[1].replace(",", "")))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 3, 6])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--default", action="store_true")
    options = parser.parse_args()
    print(f"{'programs':>8} {'slowest':>10} {'fastest':>10} {'all together':>14}  tokens/s")
    for num_programs in options.programs:
        found = rates(options.model, num_programs, options.tokens, options.default)
        print(f"{num_programs:>8} {min(found):>10.1f} {max(found):>10.1f} {sum(found):>14.1f}")


if __name__ == "__main__":
    main()
