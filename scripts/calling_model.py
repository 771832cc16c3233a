"""Writes a tiny model that calls tools, made to try clients of `serve`: nothing is trained, nothing is random.

    python -m scripts.calling_model FOLDER

Its one layer attends to the token that stands `BACK` places before the next one, and says it again. The chat template
writes there what to say: a call of each tool in turn, in the form of Hermes and Qwen, then a text. Where that is not
allowed, as within arguments, which the schema holds, or where nothing stands there, the next token follows from the
last one alone: it ends what can end.
"""

import json
import math
import string
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BACK = 256
START, END, BLANK, CALL, CALL_END = "<|im_start|>", "<|im_end|>", "<|blank|>", "<tool_call>", "</tool_call>"
CONTEXT = 65536
HEAD_DIM = 64
NUM_HEADS = 2  # HEAD_DIM codes each
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 4 * HEAD_DIM,  # the code of the token, then that of the one to say again
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou have these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nCall them so:\\n<tool_call>\\n' }}
    {{- '{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{#- What was said since the last question; smolagents sends a tool's result as a user's message. #}
{%- set said = namespace(text='') %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
            {{- '\\n</tool_call>' }}
            {%- set said.text = said.text + '"' + call.function.name + '"' %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set said.text = said.text + message.content | replace("'", '"') %}
    {%- elif message.role == 'user' and not message.content.startswith('Observation:') %}
        {%- set said.text = '' %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set next = namespace(text='', length=0) %}
    {%- for tool in tools or [] if not next.text and '"' + tool.function.name + '"' not in said.text %}
        {%- set call = '\\n{"name": "' + tool.function.name + '", "arguments": {' %}
        {%- set next.text, next.length = '<tool_call>' + call, 1 + call | length %}
    {%- endfor %}
    {%- set last = messages[-1].content %}
    {%- set write = namespace(text='') %}
    {%- if '</code>' in messages[0].content %}{#- Python that calls the first function, for smolagents #}
        {%- set call = messages[0].content.split('<code>\\ndef ')[1].split('(')[0] + '("Rome")' %}
        {%- set write.text = '<code>\\nfinal_answer(' + call + ')\\n</code>' %}
    {%- elif '[[ ## completed ## ]]' in last %}{#- each field by its type, for DSPy #}
        {%- for field in last.split('`[[ ## ')[1:] %}
            {%- set value = '{"city": "Rome"}' if 'Python dict' in field else '7' %}
            {%- if 'Literal[' in field %}
                {%- set value = field.split("'")[3 if 'observation_0' in last else 1] %}
            {%- endif %}
            {%- set write.text = write.text + '[[ ## ' + field.split('`')[0] + '\\n' + value + '\\n\\n' %}
        {%- endfor %}
    {%- else %}
        {%- for one in 'I read: ' + last[:80] %}
            {%- set write.text = write.text + (one if ' ' <= one <= '~' else ' ') %}
        {%- endfor %}
    {%- endif %}
    {%- if not next.text %}
        {%- set next.text, next.length = write.text + '<|im_end|>', 1 + write.text | length %}
    {%- endif %}
    {{- next.text + '<|blank|>' * (BACK - 11 - next.length) + '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_calling_model(folder: Path) -> Path:
    """A model folder in Hugging Face's form: config, weights, tokenizer, chat template."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": BLANK, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("BACK", str(BACK)))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": tokenizer.token_to_id(END)}))
    save_file(layer() | ends(tokenizer), folder / "model.safetensors")
    return folder


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and those of the template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, BLANK])
    tokenizer.add_tokens([CALL, CALL_END])
    return tokenizer


def layer() -> dict[str, torch.Tensor]:
    """Attention to the token `BACK` places before the next one; a residual stream with its code in the second half."""
    hidden, inner, width = CONFIG["hidden_size"], CONFIG["intermediate_size"], NUM_HEADS * HEAD_DIM
    # A query is turned so far that it meets the key of one distance exactly, and of no other one.
    speeds = CONFIG["rope_theta"] ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    turns = -(BACK - 1) * speeds
    length = math.sqrt(32 * math.sqrt(HEAD_DIM))  # the scores of other distances are lower by more than 30
    query = length * torch.cat([turns.cos(), turns.sin()])
    key = length * torch.cat([torch.ones(HEAD_DIM // 2), torch.zeros(HEAD_DIM // 2)])

    def of_any_code(vector: torch.Tensor) -> torch.Tensor:
        """A matrix that gives this vector in each head, whatever the token."""
        weight = torch.zeros(width, hidden)
        weight[:, :width] = vector.repeat(NUM_HEADS)[:, None]
        return weight

    value = torch.zeros(width, hidden)
    value[:, :width] = torch.eye(width)
    norm = torch.full([hidden], hidden**-0.5)  # a code has one 1, so that its norm is known
    tensors = {
        "input_layernorm": norm,
        "self_attn.q_proj": of_any_code(query),
        "self_attn.k_proj": of_any_code(key),
        "self_attn.v_proj": value,
        "self_attn.o_proj": value.T.roll(width, 0).contiguous(),
        "post_attention_layernorm": norm.clone(),
        "mlp.gate_proj": torch.zeros(inner, hidden),
        "mlp.up_proj": torch.zeros(inner, hidden),
        "mlp.down_proj": torch.zeros(hidden, inner),
    }
    return {f"model.layers.0.{name}.weight": tensor for name, tensor in tensors.items()}


def ends(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Embedding, last norm and head: the code of each token, and which one follows."""
    shown = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    # The first of these that may come follows; a string and a list get something in them before they end.
    order = list(dict.fromkeys([END, *'"}],:{[', CALL_END, "7", *shown, CALL]))
    code_of = {symbol: index for index, symbol in enumerate([*order, START, BLANK])}
    id_of = {symbol: (tokenizer.encode(symbol).ids or [0])[0] for symbol in code_of}
    other, width = len(code_of), NUM_HEADS * HEAD_DIM
    codes = torch.full([CONFIG["vocab_size"]], other)
    for symbol, code in code_of.items():
        codes[id_of[symbol]] = code
    embedding = torch.zeros(CONFIG["vocab_size"], CONFIG["hidden_size"])
    embedding[torch.arange(CONFIG["vocab_size"]), codes] = 1

    step, again = 16.0, 4096.0  # both far from zero after a softmax, whatever the temperature
    head = torch.zeros_like(embedding)
    for rank, symbol in enumerate(order):
        head[id_of[symbol], :width] = step * (len(order) - rank)
        head[id_of[symbol], width + code_of[symbol]] = again
    first = step * (len(order) - 0.5)
    head[id_of["a"], code_of['"']] = first
    for rank, symbol in enumerate(('"', "{", "7")):
        head[id_of[symbol], code_of["["]] = first - rank
    norm = torch.full([CONFIG["hidden_size"]], (CONFIG["hidden_size"] / 2) ** -0.5)
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}


if __name__ == "__main__":
    write_calling_model(Path(sys.argv[1]))
