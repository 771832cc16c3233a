"""The line that a batch writes for a prompt: the keys of `generate --json` and its id, or OpenAI's batch form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llmcli.batch.values import Line
from llmcli.cli.output.base import sample_json
from llmcli.engine.events import Failed, Finished
from llmcli.serve.answers import FINISH_REASONS


def result_json(
    line: Line, event: Finished | Failed, prompt_token_ids: Sequence[int], seed: int, model: str, load_seconds: float
) -> dict[str, Any]:
    """The object of one prompt."""
    if line.form != "native":
        return _openai_json(line, event, len(prompt_token_ids), model)
    if isinstance(event, Failed):
        return {"id": line.id, "error": {"message": str(event.error)}}
    facts = {"prompt_token_ids": list(prompt_token_ids), "seed": seed, "model": model}
    return {"id": line.id, **sample_json(event, load_seconds), **facts}


def _openai_json(line: Line, event: Finished | Failed, num_prompt_tokens: int, model: str) -> dict[str, Any]:
    common = {"id": f"batch_req_{line.number}", "custom_id": line.id}
    if isinstance(event, Failed):
        return {**common, "response": None, "error": {"code": "failed", "message": str(event.error)}}
    is_chat = line.form == "chat"
    content = {"message": {"role": "assistant", "content": event.text}} if is_chat else {"text": event.text}
    num_new_tokens = len(event.token_ids)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": 0, **content, "logprobs": None, "finish_reason": FINISH_REASONS[event.finish_reason]},
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_new_tokens,
            "total_tokens": num_prompt_tokens + num_new_tokens,
        },
    }
    return {**common, "response": {"status_code": 200, "body": body}, "error": None}
