"""Devices for a model; tokenizers with chat templates: a tiny one made here, and the real ones of the shared folder."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import transformers
from chat_templates import LLAMA2_TEMPLATE
from scripted_chat import ChatModel
from tiny_models import write_byte_tokenizer

from llmcli.runners.base import Runner
from llmcli.runners.numpy.load import load as load_on_numpy
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.chat_encoding import PLAIN, PLAIN_SOURCE, load_chat_template
from llmcli.tokenizer.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared"
TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Name: tokenizer folder and file, template, tokens.
REAL = {
    "llama2": ("llama2/tokenizer.model", None, {"bos_token": "<s>", "eos_token": "</s>"}),
    "plain llama2": ("llama2/tokenizer.model", PLAIN, {"bos_token": "<s>", "eos_token": "</s>"}),
    "plain llama3": (
        "llama3/tokenizer.json",
        PLAIN,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True},
    ),
    "llama3.1": (
        "llama3/tokenizer.json",
        "meta-llama-Llama-3.1-8B-Instruct.jinja",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "qwen2.5": ("qwen2/tokenizer.json", "Qwen-Qwen2.5-7B-Instruct.jinja", {"eos_token": "<|im_end|>"}),
    "qwen3": ("qwen2/tokenizer.json", "Qwen-Qwen3-0.6B.jinja", {"eos_token": "<|im_end|>"}),
}


def same_tokenizer(name: str) -> str:
    """Models with one file and one choice of tokens share a tokenizer: it takes seconds to load."""
    file, _, tokens = REAL.get(name, (name, None, {}))
    return f"{file} {tokens}"


@pytest.fixture(params=["numpy", "simulated card", pytest.param("cuda", marks=pytest.mark.cuda)])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runner]:
    """Puts a model on the CPU, on a card that numpy simulates, or on a card."""
    if request.param == "numpy":
        return load_on_numpy
    from llmcli.runners.cuda.load.model import load as load_on_card

    if request.param == "cuda":
        return partial(load_on_card, device=request.getfixturevalue("opened_device"))
    from simulated_card import simulate

    return partial(load_on_card, device=simulate(monkeypatch), uses_graphs=False)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ChatModel]]:
    """Load a tokenizer with a template by name: one of REAL, or `tiny` with one token a byte."""
    loaded: dict[str, ChatModel] = {}
    tokenizers: dict[str, Tokenizer] = {}

    def load(name: str) -> ChatModel:
        if name not in loaded:
            folder, same = tmp_path_factory.mktemp(name), name
            if name == "tiny":
                write_byte_tokenizer(folder)
                (folder / "chat_template.jinja").write_text(TINY_TEMPLATE)
            else:
                file, template, tokens = REAL[name]
                source = SHARED / "tokenizers" / file
                template_source = SHARED / "chat_templates" / template if template not in (None, PLAIN) else None
                if not source.is_file() or (template_source and not template_source.is_file()):
                    pytest.skip(f"tokenizers/{file} or its template is not in ../shared")
                (folder / source.name).symlink_to(source)
                text = PLAIN_SOURCE if template == PLAIN else LLAMA2_TEMPLATE
                text = template_source.read_text() if template_source else text
                (folder / "chat_template.jinja").write_text(text)
                (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
                same = same_tokenizer(name)
            tokenizer = tokenizers.setdefault(same, tokenizers.get(same) or load_tokenizer(folder))
            choice = PLAIN if name.startswith(PLAIN) else None
            loaded[name] = ChatModel(folder, tokenizer, load_chat_template(folder, tokenizer, choice))
        return loaded[name]

    yield load
    for model in loaded.values():
        model.template.close()


@pytest.fixture(scope="session")
def reference_ids(chat_model: Callable[[str], ChatModel]) -> Callable[..., list[int]]:
    """transformers' ids of a whole conversation."""
    loaded: dict[str, transformers.PreTrainedTokenizerBase] = {}

    def encode(name: str, messages: list[dict]) -> list[int]:
        folder = chat_model(name).folder
        same = same_tokenizer(name)
        if same not in loaded:
            if (folder / "tokenizer.json").exists():
                config = json.loads((folder / "tokenizer_config.json").read_text())
                file = str(folder / "tokenizer.json")
                loaded[same] = transformers.PreTrainedTokenizerFast(tokenizer_file=file, **config)
            else:
                loaded[same] = transformers.LlamaTokenizer.from_pretrained(folder, legacy=False)
        template = (folder / "chat_template.jinja").read_text()
        return list(
            loaded[same].apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, return_dict=False
            )
        )

    return encode
