"""`llmcli batch`: many prompts in one run, one line of JSON for each."""

from __future__ import annotations

from llmcli.cli.batch_job import open_job
from llmcli.cli.batch_options import BatchOptions
from llmcli.cli.batch_report import show_check
from llmcli.cli.batch_run import run_job
from llmcli.cli.command import with_groups
from llmcli.cli.held_texts import SchemaOptions
from llmcli.cli.options import ManyRowsRunOptions, MessageOptions, SamplerOptions, SamplingNumbers, StoppingOptions
from llmcli.cli.run import check_run


@with_groups
def batch(
    *,
    files: BatchOptions,
    options: ManyRowsRunOptions,
    stopping: StoppingOptions,
    numbers: SamplingNumbers,
    sampler: SamplerOptions,
    schema: SchemaOptions,
    messages: MessageOptions,
) -> None:
    """Run many prompts from a file and write one line of JSON for each.

    Run it again to resume: prompts that have a result in OUT are skipped.

    Examples:

    llmcli batch prompts.jsonl results.jsonl -m my-model

    llmcli batch --text - - < prompts.txt | jq -r .text
    """
    grammar = schema.read(ignore_eos=stopping.ignore_eos)
    request = check_run(options, numbers, sampler, stopping.stop, ignore_eos=stopping.ignore_eos)
    with open_job(files, request, options.model, stopping.max_new_tokens, grammar) as job:
        if files.check:
            show_check(job)
        else:
            run_job(job, require_complete=schema.require_complete)
