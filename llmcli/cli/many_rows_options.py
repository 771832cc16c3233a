"""The option `--speed-first` of batch, serve, bench and plan. Other commands run few rows."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.options import MODEL_PANEL, DeviceOptions
from llmcli.cli.run_options import RunOptions

SpeedFirstOption = Annotated[
    bool,
    typer.Option(
        "--speed-first",
        help="Decode faster where more than 8 texts run at once, on Hopper cards. A text may then depend on how many "
        "run beside it.",
        rich_help_panel=MODEL_PANEL,
    ),
]


@dataclass(frozen=True)
class ManyRowsDeviceOptions(DeviceOptions):
    """Where a model runs, in which precision, and whether a text may depend on those beside it for speed."""

    speed_first: SpeedFirstOption = False

    def checked(self) -> RunnerOptions:
        """See `DeviceOptions`."""
        return replace(super().checked(), speed_first=self.speed_first)


@dataclass(frozen=True)
class ManyRowsRunOptions(RunOptions):
    """The options of a command that generates, for many rows."""

    devices: ManyRowsDeviceOptions = ManyRowsDeviceOptions()
