"""The torch runner passes the conformance suite."""

from pathlib import Path

from bits_conformance import BitsConformance
from conformance import RunnerConformance

from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Runner
from llmcli.runners.torch.load import load


class TestTorchRunner(RunnerConformance):
    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows)


class TestTorchRunnerWithCodes(RunnerConformance):
    tolerance = 2e-4  # a sum in another order may round an element to the next code, which takes 1e-4

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows, kv_cache="int8")


class TestTorchRunnerInBfloat16(BitsConformance):
    """Packed weights have the whole contract in bfloat16: test_host_packed.py."""

    tolerance = 3e-2  # bfloat16 rounds by 2^-9, at some twenty places of a layer

    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows, dtype="bfloat16")
