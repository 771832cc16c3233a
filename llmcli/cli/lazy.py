"""What is slow to import, by name: `lazy.open_model` imports its module when it is first used.

So `--help` and usage errors come at once. The only module of the command line that imports late; beside it
`commands.py` imports the module of the command that was called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Name here -> module and name there. The imports below say the same to mypy; tests/rules compares them.
PLACES = {
    "BenchOptions": "llmcli.measure.bench:BenchOptions",
    "CardQuantizer": "llmcli.runners.cuda.quantizer:CardQuantizer",
    "CardTarget": "llmcli.cli.card_target:CardTarget",
    "Chat": "llmcli.engine.chat:Chat",
    "ChatSettings": "llmcli.engine.chat:ChatSettings",
    "Device": "llmcli.kernels.device:Device",
    "Exporter": "llmcli.checkpoint.export:Exporter",
    "FORMATS": "llmcli.checkpoint.shapes:FORMATS",
    "Fields": "llmcli.config.fields:Fields",
    "Generation": "llmcli.engine.generation:Generation",
    "HostTarget": "llmcli.cli.host_target:HostTarget",
    "Keeper": "llmcli.cli.chat_session.keeping:Keeper",
    "LineEditor": "llmcli.cli.chat_session.line_editor:LineEditor",
    "MAX_ROWS": "llmcli.runners.base:MAX_ROWS",
    "MarkdownWriter": "llmcli.cli.chat_session.markdown:MarkdownWriter",
    "Request": "llmcli.engine.request:Request",
    "SPARE_TOKENS": "llmcli.measure.bench:SPARE_TOKENS",
    "Sampler": "llmcli.sampling.sampler:Sampler",
    "Scheduler": "llmcli.engine.scheduler:Scheduler",
    "Scratch": "llmcli.measure.scratch:Scratch",
    "SourceState": "llmcli.checkpoint.export_source:SourceState",
    "Subject": "llmcli.measure.subject:Subject",
    "add_evaluation": "llmcli.checkpoint.export_files:add_evaluation",
    "compare": "llmcli.measure.evaluate:compare",
    "diff": "llmcli.measure.diff:diff",
    "distant_card": "llmcli.cli.card_target:distant_card",
    "draw_bar": "llmcli.cli.bar:draw_bar",
    "encode_chat": "llmcli.tokenizer.chat_encoding:encode_chat",
    "evaluate": "llmcli.measure.evaluate:evaluate",
    "examine": "llmcli.measure.doctor:examine",
    "find_problem": "llmcli.kernels.device:find_problem",
    "free_bytes": "llmcli.runners.cuda.arena:free_bytes",
    "inspect_model": "llmcli.measure.info:inspect_model",
    "list_cached_models": "llmcli.checkpoint.hub_cache:list_cached_models",
    "list_presets": "llmcli.config.presets:list_presets",
    "load_chat_template": "llmcli.tokenizer.chat_template:load_chat_template",
    "load_on_card": "llmcli.runners.cuda.load:load",
    "load_on_host": "llmcli.runners.torch.load:load",
    "load_preset": "llmcli.config.presets:load_preset",
    "load_tokenizer": "llmcli.tokenizer.load:load_tokenizer",
    "measure_rates": "llmcli.runners.cuda.rates:measure_rates",
    "measure_subject": "llmcli.measure.subject:measure_subject",
    "open_meter": "llmcli.measure.energy:open_meter",
    "open_model": "llmcli.checkpoint.model:open_model",
    "plan_bench": "llmcli.measure.subject:plan_bench",
    "plan_export": "llmcli.checkpoint.export_plan:plan_export",
    "plan_removal": "llmcli.checkpoint.hub_cache:plan_removal",
    "plan_subject": "llmcli.measure.subject:plan_subject",
    "product_types": "llmcli.cli.card_target:product_types",
    "read_generation_defaults": "llmcli.config.generation:read_generation_defaults",
    "refuse_existing": "llmcli.checkpoint.export_destination:refuse_existing",
    "require_room_for_torch": "llmcli.cli.address_space:require_room_for_torch",
    "require_text": "llmcli.checkpoint.export_destination:require_text",
    "resolve_destination": "llmcli.checkpoint.export_destination:resolve_destination",
    "resolve_model": "llmcli.checkpoint.hub:resolve_model",
    "shape_model": "llmcli.checkpoint.shapes:shape_model",
    "shape_names": "llmcli.checkpoint.shapes:shape_names",
    "turn_end_token_ids": "llmcli.tokenizer.chat_encoding:turn_end_token_ids",
    "verdict": "llmcli.measure.diff:verdict",
}

if TYPE_CHECKING:
    from llmcli.checkpoint.export import Exporter
    from llmcli.checkpoint.export_destination import refuse_existing, require_text, resolve_destination
    from llmcli.checkpoint.export_files import add_evaluation
    from llmcli.checkpoint.export_plan import plan_export
    from llmcli.checkpoint.export_source import SourceState
    from llmcli.checkpoint.hub import resolve_model
    from llmcli.checkpoint.hub_cache import list_cached_models, plan_removal
    from llmcli.checkpoint.model import open_model
    from llmcli.checkpoint.shapes import FORMATS, shape_model, shape_names
    from llmcli.cli.address_space import require_room_for_torch
    from llmcli.cli.bar import draw_bar
    from llmcli.cli.card_target import CardTarget, distant_card, product_types
    from llmcli.cli.chat_session.keeping import Keeper
    from llmcli.cli.chat_session.line_editor import LineEditor
    from llmcli.cli.chat_session.markdown import MarkdownWriter
    from llmcli.cli.host_target import HostTarget
    from llmcli.config.fields import Fields
    from llmcli.config.generation import read_generation_defaults
    from llmcli.config.presets import list_presets, load_preset
    from llmcli.engine.chat import Chat, ChatSettings
    from llmcli.engine.generation import Generation
    from llmcli.engine.request import Request
    from llmcli.engine.scheduler import Scheduler
    from llmcli.kernels.device import Device, find_problem
    from llmcli.measure.bench import SPARE_TOKENS, BenchOptions
    from llmcli.measure.diff import diff, verdict
    from llmcli.measure.doctor import examine
    from llmcli.measure.energy import open_meter
    from llmcli.measure.evaluate import compare, evaluate
    from llmcli.measure.info import inspect_model
    from llmcli.measure.scratch import Scratch
    from llmcli.measure.subject import Subject, measure_subject, plan_bench, plan_subject
    from llmcli.runners.base import MAX_ROWS
    from llmcli.runners.cuda.arena import free_bytes
    from llmcli.runners.cuda.load import load as load_on_card
    from llmcli.runners.cuda.quantizer import CardQuantizer
    from llmcli.runners.cuda.rates import measure_rates
    from llmcli.runners.torch.load import load as load_on_host
    from llmcli.sampling.sampler import Sampler
    from llmcli.tokenizer.chat_encoding import encode_chat, turn_end_token_ids
    from llmcli.tokenizer.chat_template import load_chat_template
    from llmcli.tokenizer.load import load_tokenizer
else:

    def __getattr__(name: str) -> Any:
        """Import what the name stands for."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = PLACES[name].split(":")
        return getattr(import_module(module), attribute)
