"""What is slow to import, by name: `lazy.open_model` imports its module when it is first used.

So `--help` and usage errors come at once. The only module of the command line that imports late; beside it
`commands.py` imports the module of the command that was called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Name here -> module of llmcli and name there. The imports below say the same to mypy; tests/rules compares them.
PLACES = {
    "BenchOptions": "measure.bench:BenchOptions",
    "CardQuantizer": "runners.cuda.quantizer:CardQuantizer",
    "CardTarget": "cli.device_targets:CardTarget",
    "Ceilings": "lab.roofline:Ceilings",
    "Chat": "engine.chat:Chat",
    "ChatSettings": "engine.chat:ChatSettings",
    "Comparison": "measure.bench:Comparison",
    "Device": "kernels.device:Device",
    "DiffFacts": "cli.output.page_diff:DiffFacts",
    "DraftModel": "engine.draft_model:DraftModel",
    "Drafting": "engine.drafts:Drafting",
    "Exporter": "checkpoint.export:Exporter",
    "FORMATS": "checkpoint.shapes:FORMATS",
    "Fields": "config.fields:Fields",
    "FrontWork": "serve.front:FrontWork",
    "Generation": "engine.generation:Generation",
    "Grammar": "schema.grammar:Grammar",
    "GrammarProcess": "schema.grammar_process:GrammarProcess",
    "HostTarget": "cli.device_targets:HostTarget",
    "KERNELS": "kernels.registry:KERNELS",
    "Keeper": "cli.chat_session.keeping:Keeper",
    "LOOPBACK_NAMES": "serve.gate:LOOPBACK_NAMES",
    "Lengths": "lab.walk:Lengths",
    "Limits": "serve.service:Limits",
    "LineEditor": "cli.chat_session.line_editor:LineEditor",
    "LogWriter": "serve.log_writer:LogWriter",
    "MAX_DRAFT_ROWS": "engine.drafts:MAX_DRAFT_ROWS",
    "MAX_ROWS": "runners.base:MAX_ROWS",
    "MarkdownWriter": "cli.chat_session.markdown:MarkdownWriter",
    "NgramSource": "engine.ngram:NgramSource",
    "NumpyProbes": "runners.numpy.probes:NumpyProbes",
    "PAGE_TOKENS": "runners.base:PAGE_TOKENS",
    "PICTURE": "cli.roofline_figure:PICTURE",
    "PromptFacts": "receipt.receipt:PromptFacts",
    "RATES": "measure.draft_steps:RATES",
    "RECEIPT_FILE": "receipt.file:RECEIPT_FILE",
    "Request": "engine.request:Request",
    "Roads": "engine.roads:Roads",
    "RungRequest": "lab.profile:RungRequest",
    "SMALL_PARAMETERS": "runners.host.memory:SMALL_PARAMETERS",
    "SPARE_TOKENS": "measure.bench:SPARE_TOKENS",
    "Sampler": "sampling.sampler:Sampler",
    "Scheduler": "engine.scheduler:Scheduler",
    "Schema": "schema.schema:Schema",
    "Scratch": "measure.scratch:Scratch",
    "Server": "serve.server:Server",
    "ServerClient": "cli.server_client:ServerClient",
    "ServerOptions": "serve.front:ServerOptions",
    "SourceState": "checkpoint.export_source:SourceState",
    "StepRequest": "lab.profile:StepRequest",
    "Subject": "measure.subject:Subject",
    "TokenPieces": "tokenizer.pieces:TokenPieces",
    "Tokens": "schema.library:Tokens",
    "TorchProbes": "runners.torch.probes:TorchProbes",
    "Vocabulary": "schema.vocabulary:Vocabulary",
    "add_evaluation": "checkpoint.export_files:add_evaluation",
    "any_json_grammar": "schema.grammar:any_json_grammar",
    "cached_repo_ids": "checkpoint.hub_library:cached_repo_ids",
    "card_of": "lab.walk:card_of",
    "check_own_kernel": "lab.own_checks:check_own_kernel",
    "choice_grammar": "schema.grammar:choice_grammar",
    "choose_call": "lab.profile:choose_call",
    "compare": "measure.evaluate:compare",
    "compare_layers": "measure.verify:compare_layers",
    "compare_logits": "measure.verify:compare_logits",
    "compare_receipts": "receipt.comparison:compare_receipts",
    "compare_rungs": "lab.compare:compare_rungs",
    "compare_samples": "receipt.comparison:compare_samples",
    "describe_on_host": "runners.host.description:describe",
    "describe_on_numpy": "runners.numpy.load:describe_on_numpy",
    "describe_run": "receipt.describe:describe_run",
    "describe_samples": "receipt.describe:describe_samples",
    "diff": "measure.diff:diff",
    "discard_typed_keys": "cli.chat_session.key_echo:discard_typed_keys",
    "distant_card": "cli.device_targets:distant_card",
    "draw_bar": "cli.bar:draw_bar",
    "encode_chat": "tokenizer.chat_encoding:encode_chat",
    "evaluate": "measure.evaluate:evaluate",
    "examine": "measure.doctor:examine",
    "excerpt": "lab.excerpt:excerpt",
    "find_cached": "checkpoint.hub:find_cached",
    "find_cached_adapter": "checkpoint.hub:find_cached_adapter",
    "find_claims": "lab.compare:find_claims",
    "find_forks": "engine.roads:find_forks",
    "find_gap": "lab.roofline:find_gap",
    "find_kept_pieces": "tokenizer.pieces:find_kept_pieces",
    "find_limit": "lab.limit:find_limit",
    "find_ncu": "lab.nsight:find_ncu",
    "find_problem": "kernels.device:find_problem",
    "find_rung": "lab.ladder:find_rung",
    "find_studies": "lab.ladder:find_studies",
    "free_bytes": "runners.cuda.arena:free_bytes",
    "grammar_of": "schema.grammar:grammar_of",
    "inspect_model": "measure.info:inspect_model",
    "inspect_rungs": "lab.compare:inspect_rungs",
    "json_schema_grammar": "schema.grammar:json_schema_grammar",
    "keep_pieces": "tokenizer.pieces:keep_pieces",
    "keys_unseen": "cli.chat_session.key_echo:keys_unseen",
    "lark_grammar": "schema.grammar:lark_grammar",
    "list_cached_models": "checkpoint.hub_cache:list_cached_models",
    "list_presets": "config.presets:list_presets",
    "load_chat_template": "tokenizer.chat_template:load_chat_template",
    "load_on_card": "runners.cuda.load:load",
    "load_on_numpy": "runners.numpy.load:load",
    "load_on_torch": "runners.torch.load:load",
    "load_preset": "config.presets:load_preset",
    "load_receipt": "receipt.file:load_receipt",
    "load_study": "lab.ladder:load_study",
    "load_tokenizer": "tokenizer.load:load_tokenizer",
    "look_at_files": "receipt.describe:look_at_files",
    "measure_change": "measure.kernel_change:measure_change",
    "measure_flops": "runners.cuda.rates:measure_flops",
    "measure_rates": "runners.cuda.rates:measure_rates",
    "measure_steps": "lab.step_times:measure_steps",
    "measure_subject": "measure.subject:measure_subject",
    "merge_adapters": "checkpoint.adapters.merge:merge_adapters",
    "num_parameters": "checkpoint.model:num_parameters",
    "open_adapter": "checkpoint.adapters.folder:open_adapter",
    "open_meter": "measure.energy:open_meter",
    "open_model": "checkpoint.model:open_model",
    "own_sources": "lab.ladder:own_sources",
    "place_calls": "lab.roofline:place_calls",
    "plan_bench": "measure.subject:plan_bench",
    "plan_conversion": "checkpoint.conversion_plan:plan_conversion",
    "plan_draft": "measure.subject:plan_draft",
    "plan_export": "checkpoint.export_plan:plan_export",
    "plan_removal": "checkpoint.hub_cache:plan_removal",
    "plan_subject": "measure.subject:plan_subject",
    "prepare_own_kernels": "lab.own_checks:prepare_own_kernels",
    "preset_names": "config.presets:preset_names",
    "product_types": "cli.device_targets:product_types",
    "profile": "lab.profile:profile",
    "read_generation_defaults": "config.generation:read_generation_defaults",
    "read_own_kernels": "lab.own_kernel:read_own_kernels",
    "read_rung": "lab.ladder:read_rung",
    "refuse_existing": "checkpoint.export_destination:refuse_existing",
    "regex_grammar": "schema.grammar:regex_grammar",
    "render_diff_page": "cli.output.page_diff:render_diff_page",
    "require_room_for_torch": "cli.address_space:require_room_for_torch",
    "require_text": "checkpoint.export_destination:require_text",
    "resolve_adapter": "checkpoint.hub:resolve_adapter",
    "resolve_destination": "checkpoint.export_destination:resolve_destination",
    "resolve_dtype": "runners.torch.precision:resolve_dtype",
    "resolve_model": "checkpoint.hub:resolve_model",
    "rung_call": "lab.profile:rung_call",
    "sampler_of": "receipt.describe:sampler_of",
    "save_figure": "cli.roofline_figure:save_figure",
    "save_receipt": "receipt.file:save_receipt",
    "shape_model": "checkpoint.shapes:shape_model",
    "shape_names": "checkpoint.shapes:shape_names",
    "study_names": "lab.ladder:study_names",
    "time_own_kernel": "lab.own_checks:time_own_kernel",
    "turn_end_token_ids": "tokenizer.chat_encoding:turn_end_token_ids",
    "verdict": "measure.diff:verdict",
    "verify_kernels": "lab.verify:verify_kernels",
    "walk_model": "lab.walk:walk_model",
    "widens_prompts": "runners.torch.precision:widens_prompts",
}

if TYPE_CHECKING:
    from llmcli.checkpoint.adapters.folder import open_adapter
    from llmcli.checkpoint.adapters.merge import merge_adapters
    from llmcli.checkpoint.conversion_plan import plan_conversion
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_destination import refuse_existing, require_text, resolve_destination
    from llmcli.checkpoint.export_files import add_evaluation
    from llmcli.checkpoint.export_plan import plan_export
    from llmcli.checkpoint.export_source import SourceState
    from llmcli.checkpoint.hub import find_cached, find_cached_adapter, resolve_adapter, resolve_model
    from llmcli.checkpoint.hub_cache import list_cached_models, plan_removal
    from llmcli.checkpoint.hub_library import cached_repo_ids
    from llmcli.checkpoint.model import num_parameters, open_model
    from llmcli.checkpoint.shapes import FORMATS, shape_model, shape_names
    from llmcli.cli.address_space import require_room_for_torch
    from llmcli.cli.bar import draw_bar
    from llmcli.cli.chat_session.keeping import Keeper
    from llmcli.cli.chat_session.key_echo import discard_typed_keys, keys_unseen
    from llmcli.cli.chat_session.line_editor import LineEditor
    from llmcli.cli.chat_session.markdown import MarkdownWriter
    from llmcli.cli.device_targets import CardTarget, HostTarget, distant_card, product_types
    from llmcli.cli.output.page_diff import DiffFacts, render_diff_page
    from llmcli.cli.roofline_figure import PICTURE, save_figure
    from llmcli.cli.server_client import ServerClient
    from llmcli.config.fields import Fields
    from llmcli.config.generation import read_generation_defaults
    from llmcli.config.presets import list_presets, load_preset, preset_names
    from llmcli.engine.chat import Chat, ChatSettings
    from llmcli.engine.draft_model import DraftModel
    from llmcli.engine.drafts import MAX_DRAFT_ROWS, Drafting
    from llmcli.engine.generation import Generation
    from llmcli.engine.ngram import NgramSource
    from llmcli.engine.request import Request
    from llmcli.engine.roads import Roads, find_forks
    from llmcli.engine.scheduler import Scheduler
    from llmcli.kernels.device import Device, find_problem
    from llmcli.kernels.registry import KERNELS
    from llmcli.lab.compare import compare_rungs, find_claims, inspect_rungs
    from llmcli.lab.excerpt import excerpt
    from llmcli.lab.ladder import find_rung, find_studies, load_study, own_sources, read_rung, study_names
    from llmcli.lab.limit import find_limit
    from llmcli.lab.nsight import find_ncu
    from llmcli.lab.own_checks import check_own_kernel, prepare_own_kernels, time_own_kernel
    from llmcli.lab.own_kernel import read_own_kernels
    from llmcli.lab.profile import RungRequest, StepRequest, choose_call, profile, rung_call
    from llmcli.lab.roofline import Ceilings, find_gap, place_calls
    from llmcli.lab.step_times import measure_steps
    from llmcli.lab.verify import verify_kernels
    from llmcli.lab.walk import Lengths, card_of, walk_model
    from llmcli.measure.bench import SPARE_TOKENS, BenchOptions, Comparison
    from llmcli.measure.diff import diff, verdict
    from llmcli.measure.doctor import examine
    from llmcli.measure.draft_steps import RATES
    from llmcli.measure.energy import open_meter
    from llmcli.measure.evaluate import compare, evaluate
    from llmcli.measure.info import inspect_model
    from llmcli.measure.kernel_change import measure_change
    from llmcli.measure.scratch import Scratch
    from llmcli.measure.subject import Subject, measure_subject, plan_bench, plan_draft, plan_subject
    from llmcli.measure.verify import compare_layers, compare_logits
    from llmcli.receipt.comparison import compare_receipts, compare_samples
    from llmcli.receipt.describe import describe_run, describe_samples, look_at_files, sampler_of
    from llmcli.receipt.file import RECEIPT_FILE, load_receipt, save_receipt
    from llmcli.receipt.receipt import PromptFacts
    from llmcli.runners.base import MAX_ROWS, PAGE_TOKENS
    from llmcli.runners.cuda.arena import free_bytes
    from llmcli.runners.cuda.load import load as load_on_card
    from llmcli.runners.cuda.quantizer import CardQuantizer
    from llmcli.runners.cuda.rates import measure_flops, measure_rates
    from llmcli.runners.host.description import describe as describe_on_host
    from llmcli.runners.host.memory import SMALL_PARAMETERS
    from llmcli.runners.numpy.load import describe_on_numpy
    from llmcli.runners.numpy.load import load as load_on_numpy
    from llmcli.runners.numpy.probes import NumpyProbes
    from llmcli.runners.torch.load import load as load_on_torch
    from llmcli.runners.torch.precision import resolve_dtype, widens_prompts
    from llmcli.runners.torch.probes import TorchProbes
    from llmcli.sampling.sampler import Sampler
    from llmcli.schema.grammar import (
        Grammar,
        any_json_grammar,
        choice_grammar,
        grammar_of,
        json_schema_grammar,
        lark_grammar,
        regex_grammar,
    )
    from llmcli.schema.grammar_process import GrammarProcess
    from llmcli.schema.library import Tokens
    from llmcli.schema.schema import Schema
    from llmcli.schema.vocabulary import Vocabulary
    from llmcli.serve.front import FrontWork, ServerOptions
    from llmcli.serve.gate import LOOPBACK_NAMES
    from llmcli.serve.log_writer import LogWriter
    from llmcli.serve.server import Server
    from llmcli.serve.service import Limits
    from llmcli.tokenizer.chat_encoding import encode_chat, turn_end_token_ids
    from llmcli.tokenizer.chat_template import load_chat_template
    from llmcli.tokenizer.load import load_tokenizer
    from llmcli.tokenizer.pieces import TokenPieces, find_kept_pieces, keep_pieces
else:

    def __getattr__(name: str) -> Any:
        """Import what the name stands for."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = PLACES[name].split(":")
        return getattr(import_module(f"llmcli.{module}"), attribute)
