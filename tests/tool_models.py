"""Tiny random models whose chat templates show a family's form of tool calls, and tools to offer them."""

import json
from pathlib import Path
from typing import Any

from tiny_models import BOS, EOS, write_tiny_llama

# In the form of each family, much shortened.
_BEGIN = "{{ bos_token }}{% for one in messages %}{% if one.role == 'tool' %}result: {{ one.content }}\n"
_END = (
    "{% else %}{{ one.role }}: {{ one.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_LISTED = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"


def _template(shown: str, call: str, between: str = "") -> str:
    calls = (
        "{% elif one.tool_calls %}assistant: {{ one.content }}"
        f"{{% for call in one.tool_calls %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{EOS}\n"
    )
    return f"{{% if tools %}}{_LISTED}{shown}\n{{% endif %}}{_BEGIN}{calls}{_END}"


_JSON = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
TEMPLATES = {
    "hermes": _template("<tool_call>", "<tool_call>\n" + _JSON.replace("KEY", "arguments") + "\n</tool_call>\n"),
    "llama": _template("<|python_tag|>", _JSON.replace("KEY", "parameters"), "; "),
    "mistral": _template("[TOOL_CALLS] [", "[TOOL_CALLS] [" + _JSON.replace("KEY", "arguments") + "]"),
    "mistral-args": _template(
        "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    ),
    "pythonic": _template("[func_name1(a=1)]", "[{{ call.function.name }}()]"),
    "json": _template("arguments", _JSON.replace("KEY", "arguments"), "\n"),
}
# Real ones: only some are special.
SPECIAL = {258: "[TOOL_CALLS]", 259: "[ARGS]", 260: "<|python_tag|>"}
WORDS = {261: "<tool_call>", 262: "</tool_call>"}


def write_tool_model(folder: Path, form: str, **overrides: Any) -> Path:
    """A model of one layer, whose vocabulary has the words of all forms."""
    write_tiny_llama(folder, **{"num_hidden_layers": 1, "max_position_embeddings": 8192, **overrides})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token_id, content in (SPECIAL | WORDS).items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": content, "special": token_id in SPECIAL, **flags})
        tokenizer["model"]["vocab"][content] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATES[form]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Wien"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "metric": {"type": "boolean"},
        },
        "required": ["city", "metric"],
    },
    description="The weather of the next days.",
)
TIME = tool("get_time")
