"""Speed and peak memory of `llmcli quantize`, on a synthetic bf16 model written to a scratch folder.

Prints for each scheme: seconds, seconds of processor time, GB/s of bf16 read, bytes written, peak resident memory, and
the bounds that hold: 0.4 GB/s on two cores, 2.5 * largest tensor + 400 MB. The model is read from the page cache, since
a slow disk would hide the program; the time includes waiting until everything is on the disk. On a busy machine
processor time is the fairer figure.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCHEMES = (("8", "128"), ("8", "channel"), ("8", "32"), ("4", "128"), ("4", "32"))
MIN_GBPS = 0.4


def measure(source: Path, destination: Path, device: str, bits: str, group_size: str) -> None:
    """Export once and print one row; run in a process of its own, since peak memory never falls."""
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_plan import plan_export
    from llmcli.checkpoint.model import open_model
    from llmcli.quantization.schemes import ExportOptions, WeightScheme

    scheme = WeightScheme(int(bits), None if group_size == "channel" else int(group_size))
    _read_through(source)
    start, processor_start = time.perf_counter(), time.process_time()
    plan = plan_export(open_model(source), ExportOptions(scheme))
    if device == "cpu":
        exporter = Exporter(plan, destination, source.name)
    else:
        from llmcli.kernels.device import Device
        from llmcli.runners.cuda.load.quantizer import CardQuantizer

        card = Device.open(int(device.partition(":")[2] or 0))
        exporter = Exporter(plan, destination, source.name, open_quantizer=lambda: CardQuantizer(card, plan.weights))
    exporter.run(exporter.prepare(), lambda done, total: None, lambda name, quality: None)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    total = plan.total
    gbps = total.bytes_before / seconds / 1e9
    peak = _peak_bytes()
    bound = 2.5 * max(weight.info.num_bytes for weight in plan.weights) + 400e6
    verdict = "within" if peak <= bound and gbps >= MIN_GBPS else "OUTSIDE"
    print(
        f"{scheme!s:<24} {seconds:>7.2f} s, {processor_seconds:>6.2f} s of processor   "
        f"{gbps:>6.2f} GB/s   written {total.bytes_after / 1e9:>6.2f} GB   "
        f"peak {peak / 1e6:>6.0f} MB   {verdict} the bounds of {MIN_GBPS} GB/s and {bound / 1e6:.0f} MB",
        flush=True,
    )


def _read_through(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def _peak_bytes() -> int:
    """Peak resident memory of this program; getrusage would count what its parent held when it started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Write the model once, then export it once for each scheme."""
    from benchmark_load import write_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; opening a card counts in the time.")
    parser.add_argument("--scratch", type=Path, help="Folder on the disk to measure; the system's own by default.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        source, destination = Path(scratch) / "source", Path(scratch) / "export"
        source.mkdir()
        write_model(source, arguments.gigabytes)
        for bits, group_size in SCHEMES:
            subprocess.run(
                [sys.executable, __file__, str(source), str(destination), arguments.device, bits, group_size],
                check=True,
            )
            shutil.rmtree(destination)


if __name__ == "__main__":
    if len(sys.argv) == 6 and not sys.argv[1].startswith("-"):
        measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
    else:
        main()
