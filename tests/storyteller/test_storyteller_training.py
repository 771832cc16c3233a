import csv
import json
from itertools import islice

import numpy as np
import pytest
import torch
from storyteller.corpus import documents
from storyteller.data import ID_MASK, ROW_TOKENS, SILENT, make_rows
from storyteller.export import export
from storyteller.model import Llama, Shape
from storyteller.tokenizer import BOS_ID, END_ID, EOS_ID, MARKER_IDS, Encoder
from storyteller.train import Trainer, document_mask, learning_rate, parse, split_rows, train

from llmcli.config.presets import load_preset

TINY = Shape(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def test_the_cache_encodes_as_sentencepiece_does(tokenizer):
    encoder = Encoder(tokenizer)
    texts = [text for document in islice(documents(5, 5), 60) for _, text in document]
    for text in [*texts, "Zqxöß  two spaces\n\n\nπ", "", " ", "<|end|>"]:
        assert encoder.encode(text) == encoder.processor.encode(text)
        assert encoder.processor.decode(encoder.encode(text)) == text


def test_text_cannot_forge_a_marker(tokenizer):
    encoder = Encoder(tokenizer)
    assert encoder.processor.get_piece_size() == 4096
    assert not set(encoder.encode("<|end|><|assistant|></s>")) & {EOS_ID, END_ID, *MARKER_IDS.values()}


def test_the_loss_counts_only_what_is_told(tokenizer):
    encoder = Encoder(tokenizer)
    ids, counts = encoder.encode_document([("user", "Hi"), ("assistant", "Hello!")], 1024)
    assert ids[0] == BOS_ID
    told = [i for i, counted in zip(ids, counts, strict=True) if counted]
    assert told == [*encoder.encode("Hello!"), END_ID]
    ids, counts = encoder.encode_document([("", "Once.")], 1024)
    assert counts == [False] + [True] * (len(ids) - 1)
    assert ids[-1] == EOS_ID
    ids, counts = encoder.encode_document([("given", "Qzx 7"), ("", " went home.")], 1024)
    told = [i for i, counted in zip(ids, counts, strict=True) if counted]
    assert told == [*encoder.encode(" went home."), EOS_ID]
    assert encoder.processor.decode(ids[1 : -len(told)]) == "Qzx 7"
    short, _ = encoder.encode_document([("user", "Hi"), ("assistant", "Hello! " * 50)], 20)
    assert len(short) <= 20


def test_what_is_typed_comes_in_other_pieces_now_and_then(tokenizer):
    text = "Tell me a story about a fox."
    encoder = Encoder(tokenizer, 3)
    typed = [encoder.encode_typed(text) for _ in range(200)]
    others = sum(ids != encoder.encode(text) for ids in typed)
    assert 20 < others < 100
    assert {encoder.processor.decode(ids) for ids in typed} == {text}
    assert [Encoder(tokenizer, 3).encode_typed(text)] == typed[:1]


def test_rows_hold_whole_documents(tokenizer):
    # More than a hundred rows, of which only the last has room.
    rows, num_documents = make_rows(tokenizer, 3, 0, "train", 150_000)
    again, _ = make_rows(tokenizer, 3, 0, "train", 150_000)
    assert np.array_equal(rows, again)
    assert rows.shape[1] == ROW_TOKENS
    assert rows.dtype == np.uint16
    assert ((rows & ID_MASK) == BOS_ID).sum() == num_documents
    assert ((rows & ID_MASK)[:, 0] == BOS_ID).all()
    assert (rows != SILENT).mean() > 0.99


def test_targets_are_the_next_counted_token():
    rows = torch.tensor([[BOS_ID | SILENT, 10 | SILENT, 11, 12]], dtype=torch.int32).to(torch.int16)
    token_ids, targets = split_rows(rows)
    assert token_ids.tolist() == [[1, 10, 11, 12]]
    assert targets.tolist() == [[-100, 11, 12, -100]]


def test_separate_documents_do_not_see_each_other():
    torch.manual_seed(0)
    model = Llama(TINY).eval()
    first, second = [BOS_ID, 50, 60, EOS_ID], [BOS_ID, 70, 80]
    joined = torch.tensor([first + second])
    masked = model(joined, document_mask(joined))
    assert torch.allclose(masked[:, 4:], model(torch.tensor([second])), atol=1e-5)
    assert not torch.allclose(model(joined)[:, 4:], masked[:, 4:], atol=1e-5)


def test_the_default_shape_is_within_its_limits():
    shape = Shape()
    assert 6e6 <= Llama(shape).num_parameters() <= 12e6
    assert shape.hidden_size % 128 == 0
    assert shape.intermediate_size % 128 == 0
    assert shape.num_key_value_heads < shape.num_attention_heads
    assert shape.num_attention_heads % shape.num_key_value_heads == 0


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(progress / 100, 1.0) for progress in range(101)]
    assert rates[0] < 0.01
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.03)


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory):
    """A tiny training of two runs, the second resumed."""
    folder = tmp_path_factory.mktemp("training")
    rows, _ = make_rows(tokenizer, 1, 0, "train", 20_000)
    np.save(folder / "train-0000.npy", rows)
    np.save(folder / "val.npy", make_rows(tokenizer, 1, 0, "test", 1_500)[0])
    words = ["--data", str(folder), "--out", str(folder / "run")]
    words += ["--rows", "1", "--hidden", "128", "--intermediate", "128",
             "--layers", "1", "--kv-heads", "1", "--log-every", "4", "--max-minutes", "1", "--lr", "1e-2"]  # fmt: skip
    first = train(parse([*words, "--max-steps", "4"]))
    second = train(parse([*words, "--max-steps", "20"]))
    return folder / "run", first, second


def test_the_loss_falls_and_a_run_resumes(trained):
    run, first, second = trained
    assert second < first - 0.5
    rows = list(csv.DictReader((run / "loss.csv").open()))
    assert [int(row["step"]) for row in rows if row["loss"]] == [4, 8, 12, 16, 20]
    assert (run / "loss.svg").read_text().startswith("<svg")


def test_the_weights_of_the_best_held_out_loss_are_kept(trained, tmp_path):
    run, _, second = trained
    best, last = (torch.load(run / name, weights_only=True) for name in ("best.pt", "checkpoint.pt"))
    assert best["held_out_loss"] == last["best_loss"] == second
    assert all(torch.equal(weight, last["model"][name]) for name, weight in best["model"].items())

    words = ["--data", str(tmp_path), "--out", str(tmp_path), "--hidden", "128", "--intermediate", "128",
             "--layers", "1", "--kv-heads", "1"]  # fmt: skip
    trainer = Trainer(parse(words))
    trainer.load(run / "checkpoint.pt")
    trainer.keep_best(second + 0.1, tmp_path / "best.pt")
    assert not (tmp_path / "best.pt").exists()
    trainer.keep_best(second - 0.1, tmp_path / "best.pt")
    with torch.no_grad():
        trainer.model.norm.weight.zero_()
    trainer.keep_best(second, tmp_path / "best.pt")
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    assert kept["held_out_loss"] == second - 0.1
    assert torch.equal(kept["model"]["norm.weight"], last["model"]["norm.weight"])


def test_the_export_is_a_hugging_face_folder(trained, tokenizer, tmp_path):
    run, _, _ = trained
    export(run / "best.pt", tokenizer, tmp_path / "model", max_file_mib=0.5)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [EOS_ID, END_ID]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "model.layers.0.self_attn.q_proj.weight" in index["weight_map"]
    generation_config = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    preset = load_preset("story").sampling
    assert preset.items() <= generation_config.items()
    assert generation_config["eos_token_id"] == [EOS_ID, END_ID]


def test_transformers_computes_the_same_logits(trained, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    run, _, _ = trained
    export(run / "checkpoint.pt", tokenizer, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    own = Llama(Shape(**state["shape"]))
    own.load_state_dict({name: weight.bfloat16().float() for name, weight in state["model"].items()})
    hub = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "Tell me a story about Zib.\n\nPlease"},
        {"role": "assistant", "content": "Once"},
    ]
    token_ids = hub.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert token_ids == Encoder(tokenizer).encode_document([(m["role"], m["content"]) for m in messages], 1024)[0]
    logits = own(torch.tensor([token_ids]))
    assert torch.allclose(reference(torch.tensor([token_ids])).logits, logits, atol=1e-4)
