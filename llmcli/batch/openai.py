"""Lines in the form of OpenAI's batch files. Refuses what this program does not do, by the key's name."""

from collections.abc import Mapping
from typing import Any

from llmcli.batch.values import Form, Line, integer_of, seed_of, stop_of, text_of
from llmcli.differences import refuse_unknown, shown
from llmcli.errors import UsageError
from llmcli.openai_body import drop_idle, read_messages
from llmcli.sampling.params import SPECS, check_param, read_logit_bias
from llmcli.schema.held_to import held_to_of_format

URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
KEYS = ("custom_id", "method", "url", "body")
BODY_KEYS = ("model", "max_tokens", "max_completion_tokens", "seed", "stop", "logit_bias", "n", "response_format")


def is_openai(values: Mapping[str, Any]) -> bool:
    """Whether a line is meant in this form."""
    return not values.keys().isdisjoint(KEYS)


def parse_openai(values: dict[str, Any], number: int, model_names: tuple[str, ...]) -> Line:
    """One line; a null in the body counts as a key that is not there.

    Raises: UsageError that names the key and what is expected.
    """
    refuse_unknown(values, KEYS)
    for key in KEYS:
        if key not in values:
            raise UsageError(f"{key} is missing, expected {', '.join(KEYS)}")
    if values["method"] != "POST":
        raise UsageError(f"method is {shown(values['method'])}, expected 'POST'")
    form = URLS.get(values["url"]) if isinstance(values["url"], str) else None
    if form is None:
        raise UsageError(f"url is {shown(values['url'])}, expected {' or '.join(URLS)}")
    if not isinstance(values["body"], dict):
        raise UsageError(f"body is {shown(values['body'])}, expected an object")
    prompt_key = "messages" if form == "chat" else "prompt"
    asked = drop_idle(values["body"], (prompt_key, *BODY_KEYS, *SPECS), "body.")
    body = {f"body.{key}": value for key, value in asked.items()}
    if f"body.{prompt_key}" not in body:
        raise UsageError(f"body.{prompt_key} is missing, and {values['url']} needs it")
    if (model := body.get("body.model")) is not None and model not in model_names:
        raise UsageError(
            f"body.model is {shown(model)}, expected {' or '.join(map(repr, dict.fromkeys(model_names)))}; "
            "name this run's model, or leave the key out"
        )
    if body.get("body.n", 1) != 1 or isinstance(body.get("body.n"), bool):
        raise UsageError(f"body.n is {shown(body['body.n'])}, expected 1; write one line for each text")
    return Line(
        number,
        text_of("custom_id", values["custom_id"]),
        prompt=text_of("body.prompt", body["body.prompt"]) if form == "completion" else None,
        messages=read_messages("body.messages", body["body.messages"]) if form == "chat" else None,
        seed=seed_of("body.seed", body["body.seed"]) if "body.seed" in body else None,
        max_new_tokens=_max_new_tokens(body),
        stop=stop_of("body.stop", body["body.stop"]) if body.get("body.stop", []) != [] else (),
        sampling={name: check_param(name, body[f"body.{name}"]) for name in SPECS if f"body.{name}" in body},
        logit_bias=_logit_bias(body.get("body.logit_bias", {})),
        form=form,
        held_to=held_to_of_format("body.response_format", body.get("body.response_format")),
    )


def _max_new_tokens(body: Mapping[str, Any]) -> int | None:
    given = [key for key in ("body.max_tokens", "body.max_completion_tokens") if key in body]
    if len(given) == 2:
        raise UsageError(f"{given[0]} and {given[1]} set the same limit; give one of them")
    return integer_of(given[0], body[given[0]], 1) if given else None


def _logit_bias(value: Any) -> dict[int, float]:
    try:
        return read_logit_bias(value)
    except ValueError as error:
        raise UsageError(f"body.logit_bias is {error}") from None
