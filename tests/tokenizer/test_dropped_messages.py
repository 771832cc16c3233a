"""A message that the template does not write is refused with its role, never silently left out."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as reference

from llmcli.errors import TokenizerError
from llmcli.tokenizer.chat_template import PLAIN_SOURCE, ChatTemplate

KNOWN = """\
{%- for message in messages -%}
{%- if message.role in ['system', 'user', 'assistant'] -%}
[{{ message.role }}]{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}"""
FIRST_SYSTEM = """\
{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}{{ message.content | upper }}{%- endfor -%}"""
CUT = "{%- for message in messages -%}{{ message.content[2:9] }}{%- endfor -%}"
PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "chat_templates"


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    made = ChatTemplate(request.param, "the template T", {})
    yield made
    made.close()


def talk(*roles: str, content: str = "a") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role in roles]


@pytest.mark.parametrize("template", [KNOWN], indirect=True)
@pytest.mark.parametrize("role", ["tool", "ipython", "developer", "User", "", "\n", "x" * 500])
def test_an_unknown_role_is_named(template: ChatTemplate, role: str) -> None:
    """Even if its text is elsewhere in the prompt."""
    template.refuse_dropped(talk("system", "user", "assistant", "user"))
    words = f"the template T leaves out message 2 of 3, whose role is {role[:40]!r}; use another role, or"
    for _ in range(2):
        with pytest.raises(TokenizerError) as caught:
            template.refuse_dropped(talk("user", role, "user"))
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize("template", [FIRST_SYSTEM], indirect=True)
def test_a_role_at_another_place_is_another_thing(template: ChatTemplate) -> None:
    template.refuse_dropped(talk("system", "user"))
    with pytest.raises(TokenizerError, match="leaves out message 2 of 3, whose role is 'system'"):
        template.refuse_dropped(talk("user", "system", "user"))


@pytest.mark.parametrize("template", [CUT, PLAIN_SOURCE], indirect=True)
@pytest.mark.parametrize("content", ["", "a", "long enough to be cut"])
def test_what_is_cut_is_not_left_out(template: ChatTemplate, content: str) -> None:
    template.refuse_dropped(talk("system", "user", "assistant", "narrator", content=content))


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published chat templates")
def test_published_templates_against_transformers() -> None:
    """Every message of each conversation has its own text, which transformers' rendering contains or not."""
    num_refused = num_taken = 0
    for path in sorted(PUBLISHED.glob("*.jinja")):
        source = path.read_text()
        made = ChatTemplate(source, "the template T", {"bos_token": "<s>"})
        for roles in product(["system", "user", "assistant", "tool", "ipython", "developer"], repeat=2):
            messages = [{"role": role, "content": f"content{index}"} for index, role in enumerate(roles)]
            try:
                (rendered,), _ = reference.render_jinja_template(
                    [messages], chat_template=source, bos_token="<s>", add_generation_prompt=True
                )
            except Exception:  # the template's own refusal
                continue
            is_whole = all(message["content"] in rendered for message in messages)
            if is_whole:
                made.refuse_dropped(messages)
                num_taken += 1
            else:
                with pytest.raises(TokenizerError, match="leaves out message"):
                    made.refuse_dropped(messages)
                num_refused += 1
        made.close()
    assert num_taken > 50
    assert num_refused > 0
