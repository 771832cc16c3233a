"""`--receipt FILE`: everything that the text depended on, and the text, for `llmcli replay`.

Refuses to replace what is not a receipt.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Event, Finished

if TYPE_CHECKING:
    from llmcli.cli.run import Run
    from llmcli.engine.request import Request
    from llmcli.receipt.receipt import PromptFacts
    from llmcli.runners.base import Runner


class ReceiptOutput:
    """Notes how the model's files are when it is made, hashes them while the text comes, and writes at the end.

    Raises: CheckpointError for a file that is gone.
    """

    def __init__(self, path: Path, run: Run, prompt: PromptFacts, *, replace: bool):
        self._path = path
        self._replace = replace
        self._run = run
        self._prompt = prompt
        self._digests = lazy.look_at_files(run.session.model, prompt)

    def begin(self, runner: Runner, request: Request) -> ReceiptOutput:
        """The weights have been read: begin to hash them, which no longer keeps the first token waiting."""
        self._runner, self._request = runner, request
        self._digests.start()
        return self

    def show(self, event: Event) -> None:
        """Nothing is written before the end."""

    def finish(self, finished: list[Finished]) -> None:
        """Write the receipt of a run that came to its end.

        Raises: CheckpointError if a file of the model has changed; OutputError, UsageError if it cannot be written.
        """
        if len(finished) < len(self._request.samples) or any(item.finish_reason == "interrupted" for item in finished):
            self._digests.stop()
            terminal.info("no receipt: the run was interrupted")
            return
        run = self._run
        with progress(f"hashing {run.session.name}") as on_progress:
            files = self._digests.wait(on_progress)
        receipt = lazy.describe_run(
            run.model,
            run.session.model,
            self._runner,
            run.devices.card,
            self._prompt,
            self._request,
            files,
            lazy.describe_samples(finished),
        )
        lazy.save_receipt(self._path, receipt, replace=self._replace)
        terminal.info(f"receipt: {self._path}")
