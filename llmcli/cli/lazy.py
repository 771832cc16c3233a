"""Slow imports, by name: `lazy.open_model` imports its module when it is first used. A type is named here too.

So `--help` and usage errors are fast. The imports below are for mypy and never run: this module parses them from its
own text. No other module of the command line imports late, but for `main.py`, which imports the module
of the called command.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.batch.on_ray import RayScheduler, ray_version
    from llmcli.batch.on_ray import Work as RayWork
    from llmcli.batch.on_ray import connect as connect_to_ray
    from llmcli.checkpoint.adapter import Adapter, open_adapter
    from llmcli.checkpoint.adapter_merge import merge_adapters
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_plan import ExportPlan, PlannedWeight, plan_conversion, plan_export
    from llmcli.checkpoint.export_workspace import (
        ExportWorkspace,
        add_evaluation,
        refuse_existing,
        require_text,
        resolve_destination,
    )
    from llmcli.checkpoint.folder import SourceState
    from llmcli.checkpoint.hub import (
        find_cached,
        find_cached_adapter,
        list_cached_models,
        plan_removal,
        resolve_adapter,
        resolve_model,
    )
    from llmcli.checkpoint.hub_library import cached_repo_ids
    from llmcli.checkpoint.model import Model, num_parameters, open_model
    from llmcli.checkpoint.random_weights import FORMATS, shape_model, shape_names
    from llmcli.cli.address_space import require_room_for_torch
    from llmcli.cli.bar import draw_bar
    from llmcli.cli.chat_session.key_echo import discard_typed_keys, keys_unseen
    from llmcli.cli.chat_session.line_editor import LineEditor
    from llmcli.cli.chat_session.markdown import MarkdownWriter
    from llmcli.cli.device_targets import CardTarget, HostTarget, distant_card, product_types
    from llmcli.cli.output.page_diff import DiffFacts, render_diff_page
    from llmcli.cli.roofline_figure import PICTURE, save_figure
    from llmcli.cli.server_client import ServerClient
    from llmcli.config.fields import Fields, GenerationDefaults, read_generation_defaults
    from llmcli.config.llama import LlamaConfig
    from llmcli.config.presets import list_presets, load_preset, preset_names
    from llmcli.differences import Difference
    from llmcli.engine.chat import Chat, ChatSettings
    from llmcli.engine.draft_sources import DraftModel, NgramSource
    from llmcli.engine.drafts import MAX_DRAFT_ROWS, Drafting, DraftUsage
    from llmcli.engine.remote.worker import EngineFacts, OpenedEngine
    from llmcli.engine.request import Request
    from llmcli.engine.roads import Road, Roads, RoadToken, find_forks
    from llmcli.engine.scheduler import Generation, Scheduler
    from llmcli.kernels.device import Device, find_problem
    from llmcli.lab.compare import Finding, Measured, compare_rungs, find_claims, inspect_rungs
    from llmcli.lab.engine import KERNELS
    from llmcli.lab.nsight import Counters, Limit, find_limit, find_ncu
    from llmcli.lab.own_kernel import OwnKernel, read_own_kernels
    from llmcli.lab.profile import RungRequest, StepRequest, choose_call, profile, rung_call
    from llmcli.lab.roofline import Ceilings, TimedStep, find_gap, measure_steps, place_calls
    from llmcli.lab.study import (
        Rung,
        Source,
        Study,
        excerpt,
        find_rung,
        find_studies,
        load_study,
        own_sources,
        read_rung,
        study_names,
    )
    from llmcli.lab.verify import (
        KernelVerdict,
        TimesAlone,
        check_own_kernel,
        prepare_own_kernels,
        time_own_kernel,
        verify_kernels,
    )
    from llmcli.lab.walk import Call, Lengths, card_of, walk_model
    from llmcli.measure.bench import (
        RATES,
        SPARE_TOKENS,
        BenchOptions,
        BenchReport,
        DecodeFigures,
        DraftFigures,
        KernelComparison,
        PromptFigures,
        Spread,
        measure_change,
    )
    from llmcli.measure.doctor import examine
    from llmcli.measure.energy import EnergyMeter, open_meter
    from llmcli.measure.evaluate import Comparison, DiffToken, Evaluation, Verdict, compare, diff, evaluate, verdict
    from llmcli.measure.info import ModelInfo, inspect_model
    from llmcli.measure.plan import DraftPlan, MemoryUse, Plan
    from llmcli.measure.subject import (
        Scratch,
        Subject,
        Target,
        TargetPlan,
        measure_subject,
        plan_bench,
        plan_draft,
        plan_subject,
    )
    from llmcli.measure.verify import LayerVerdict, LogitsVerdict, compare_layers, compare_logits
    from llmcli.quantization.rounding import TensorQuality
    from llmcli.receipt.describe import describe_run, describe_samples, look_at_files, sampler_of
    from llmcli.receipt.receipt import (
        RECEIPT_FILE,
        PromptFacts,
        Receipt,
        SampleComparison,
        compare_receipts,
        compare_samples,
        load_receipt,
        save_receipt,
    )
    from llmcli.runners.base import MAX_ROWS, PAGE_TOKENS, Runner
    from llmcli.runners.cuda.load.model import load as load_on_card
    from llmcli.runners.cuda.load.quantizer import CardQuantizer
    from llmcli.runners.cuda.predict.rates import measure_flops, measure_rates
    from llmcli.runners.cuda.step.arena import free_bytes
    from llmcli.runners.host.load import describe as describe_on_host
    from llmcli.runners.host.memory import SMALL_PARAMETERS
    from llmcli.runners.numpy.load import NumpyProbes, describe_on_numpy
    from llmcli.runners.numpy.load import load as load_on_numpy
    from llmcli.runners.torch.load import TorchProbes
    from llmcli.runners.torch.load import load as load_on_torch
    from llmcli.runners.torch.precision import resolve_dtype, widens_prompts
    from llmcli.sampling.inspect import Inspection, StepEffect, TokenProbability
    from llmcli.sampling.params import ResolvedSampling, Sampler
    from llmcli.schema.constraint import Constraint
    from llmcli.schema.grammar import (
        Grammar,
        GrammarProcess,
        any_json_grammar,
        choice_grammar,
        grammar_of,
        json_schema_grammar,
        lark_grammar,
        regex_grammar,
    )
    from llmcli.schema.library import Tokens
    from llmcli.schema.schema import Schema, Vocabulary
    from llmcli.serve.app import LOOPBACK_NAMES
    from llmcli.serve.bodies import ChatBody, CompletionBody, TextsBody
    from llmcli.serve.front import FrontWork, ServerOptions
    from llmcli.serve.server import LogWriter, Server
    from llmcli.serve.service import ClientLimits
    from llmcli.tokenizer.base import Tokenizer
    from llmcli.tokenizer.chat_encoding import ChatTemplate, encode_chat, load_chat_template, turn_end_token_ids
    from llmcli.tokenizer.load import load_tokenizer
    from llmcli.tokenizer.pieces import TokenPieces, find_kept_pieces, keep_pieces
else:

    def __getattr__(name: str) -> Any:
        """Import the object of that name."""
        if name not in find_places():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = find_places()[name]
        return getattr(import_module(f"llmcli.{module}"), attribute)


@cache
def find_places() -> dict[str, tuple[str, str]]:
    """Name here -> module of llmcli and name there. Parsed at the first use, in a millisecond."""
    (block,) = (node for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = [(node, (node.module or "").removeprefix("llmcli.")) for node in imports]
    return {one.asname or one.name: (module, one.name) for node, module in modules for one in node.names}
