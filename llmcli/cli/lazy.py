"""Slow imports, by module: `lazy.model` is imported when something of it is first used. Types are named by it, too.

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
    from llmcli import differences, tool_calls, tools
    from llmcli.batch import on_ray
    from llmcli.checkpoint import (
        adapter,
        adapter_merge,
        export,
        export_plan,
        export_workspace,
        folder,
        gguf_model,
        hub,
        hub_library,
        model,
        random_weights,
        reader,
    )
    from llmcli.cli import address_space, bar, device_targets, roofline_figure, server_client, settings
    from llmcli.cli.chat_session import kept_chats, key_echo, line_editor, markdown
    from llmcli.cli.output import page_diff
    from llmcli.config import fields, llama, presets
    from llmcli.engine import chat, chat_events, draft_sources, drafts, request, roads, scheduler
    from llmcli.engine.remote import worker
    from llmcli.kernels import device
    from llmcli.lab import compare, nsight, own_kernel, profile, roofline, study, walk
    from llmcli.lab import engine as lab_engine
    from llmcli.lab import verify as kernel_checks
    from llmcli.measure import bench, doctor, energy, evaluate, info, plan, subject, verify
    from llmcli.quantization import rounding
    from llmcli.receipt import describe, receipt
    from llmcli.runners import base as runners
    from llmcli.runners.cuda.load import model as card_model
    from llmcli.runners.cuda.load import quantizer
    from llmcli.runners.cuda.predict import rates
    from llmcli.runners.cuda.step import arena
    from llmcli.runners.host import load as host_load
    from llmcli.runners.host import memory
    from llmcli.runners.numpy import load as numpy_load
    from llmcli.runners.torch import load as torch_load
    from llmcli.runners.torch import precision
    from llmcli.sampling import inspect, params
    from llmcli.schema import constraint, grammar, library, schema
    from llmcli.serve import app, bodies, front, server, service
    from llmcli.tokenizer import base as tokenizer
    from llmcli.tokenizer import chat_encoding, pieces, tool_offer
    from llmcli.tokenizer import load as tokenizer_load
else:

    def __getattr__(name: str) -> Any:
        """Import the module of that name."""
        if name not in find_places():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"llmcli.{find_places()[name]}")


@cache
def find_places() -> dict[str, str]:
    """Name here -> module of llmcli. Parsed at the first use, in a millisecond."""
    (block,) = (node for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    paths = [(one, f"{node.module}.{one.name}") for node in imports for one in node.names]
    return {one.asname or one.name: path.removeprefix("llmcli.") for one, path in paths}
