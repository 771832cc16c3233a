"""`llmcli batch`: many prompts in one run, one line of JSON for each."""

from __future__ import annotations

from llmcli.cli.batch_job import open_job
from llmcli.cli.batch_options import BatchOptions
from llmcli.cli.batch_report import show_check
from llmcli.cli.batch_run import run_job
from llmcli.cli.groups import with_groups
from llmcli.cli.options import MessageOptions, RunOptions, SamplerOptions, SamplingNumbers, StoppingOptions
from llmcli.cli.run import check_run


@with_groups
def batch(
    *,
    numbers: SamplingNumbers,
    files: BatchOptions,
    options: RunOptions,
    stopping: StoppingOptions,
    sampler: SamplerOptions,
    messages: MessageOptions,
) -> None:
    """Run many prompts, one a line, and write one line of JSON for each.

    Run again, it goes on where it ended: what OUT holds is not run a second time.

    [bold]Examples[/bold]

    llmcli batch prompts.jsonl results.jsonl -m path/to/model --seed 1

    llmcli batch --text - - --max-new-tokens 20 < prompts.txt | jq -r .text
    """
    request = check_run(options, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos)
    with open_job(files, request, options.model, stopping.max_new_tokens) as job:
        if files.check:
            show_check(job)
        else:
            run_job(job)
