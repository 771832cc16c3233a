"""`llmcli kernels profile`: one kernel of a model in Nsight Compute, and the few figures that matter."""

from __future__ import annotations

from typing import Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.bench import ReportOptions
from llmcli.cli.compile_notice import say_compiling
from llmcli.cli.groups import with_groups
from llmcli.cli.kernel_options import LengthOptions, SubjectOption, open_walked, require_kernels
from llmcli.cli.kernels_bench import CEILING_TYPES, ScratchOption, open_card
from llmcli.cli.options import FormatOption, MessageOptions
from llmcli.cli.profile_report import Profiled, profile_csv, profile_json, profile_text
from llmcli.cli.targets import subject_files
from llmcli.cli.terminal import terminal


@with_groups
def profile_kernel(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The kernel, as llmcli kernels list names it.")],
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER",
            help="Its launches that read the weights of this layer, such as o_proj.",
            show_default="those that move most bytes",
        ),
    ] = None,
    model: SubjectOption = None,
    form: FormatOption = None,
    lengths: LengthOptions = LengthOptions(),  # noqa: B008
    scratch: ScratchOption = None,
    output: ReportOptions = ReportOptions(),  # noqa: B008
    messages: MessageOptions = MessageOptions(),  # noqa: B008
) -> None:
    """Profile one kernel of a model with Nsight Compute.

    It needs NVIDIA's ncu, and says how to get it. The kernel runs on the model's own arrays, as in bench, and each
    figure comes with what it means.

    Examples:

    llmcli kernels profile gemv

    llmcli kernels profile gemv --matrix o_proj -m Llama-2-7B
    """
    require_kernels([name])
    subject = open_walked(model, form)
    tokens = lengths.within(subject)
    device = open_card()
    ncu = lazy.find_ncu()
    walks = lazy.walk_model(subject.model, tokens, device.facts, device.arch, say_compiling)
    chosen = lazy.choose_call(walks, name, matrix)
    rates = lazy.measure_rates(device, CEILING_TYPES)
    with subject_files(subject, scratch, keep=False) as files:
        terminal.info(f"profiling {name} with {ncu}; it loads the model first")
        request = lazy.ProfileRequest(str(files.checkpoint.folder.resolve()), tokens, chosen.step, chosen.index)
        counters = lazy.profile(ncu, request, device.arch)
    one = Profiled(
        subject.full_name,
        device.name,
        device.arch,
        device.num_multiprocessors,
        chosen,
        lazy.Ceilings(rates.read_bytes, rates.flops),
        counters,
        lazy.find_limit(counters, chosen.call.use, device.num_multiprocessors),
    )
    if output.json_:
        terminal.write_json(profile_json(one))
    elif output.csv_:
        terminal.write(profile_csv(one))
    else:
        terminal.write(profile_text(one), is_drawn=True)
