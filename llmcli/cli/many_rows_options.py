"""`--speed-first`, of the commands that run or plan many rows: batch, serve, bench and plan. Others run few."""

from dataclasses import dataclass
from typing import Annotated

import typer

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.options import MODEL_PANEL, DeviceOptions
from llmcli.cli.run_options import RunOptions

SpeedFirstOption = Annotated[
    bool,
    typer.Option(
        "--speed-first",
        help="Decode more than 64 texts side by side faster, on Hopper cards; a text may then depend on how many run "
        "beside it.",
        rich_help_panel=MODEL_PANEL,
    ),
]


@dataclass(frozen=True)
class ManyRowsDeviceOptions(DeviceOptions):
    """Where a model runs, in which precision, and whether speed comes before texts that depend on no other."""

    speed_first: SpeedFirstOption = False

    def checked(self) -> RunnerOptions:
        """See `DeviceOptions`."""
        return RunnerOptions(self.device, self.dtype, self.threads, self.kv_cache, self.speed_first)


@dataclass(frozen=True)
class ManyRowsRunOptions(RunOptions):
    """The options of a command that generates, for many rows."""

    devices: ManyRowsDeviceOptions = ManyRowsDeviceOptions()
