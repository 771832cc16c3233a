"""The numpy runner passes the conformance suite."""

from pathlib import Path

from conformance import RunnerConformance

from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Runner
from llmcli.runners.numpy.load import load


class TestNumpyRunner(RunnerConformance):
    @classmethod
    def load(cls, folder: Path, *, max_seq_len: int, num_rows: int) -> Runner:
        return load(open_model(folder), max_seq_len=max_seq_len, num_rows=num_rows)
