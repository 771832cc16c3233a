"""`--html`: a well-formed page in which nothing of prompt or model runs or loads, and whose data are the events'."""

import math
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from html_tree import Element, data_of, luminance, parse
from inspected_runs import END, PieceTokenizer, make_events, make_facts, play

from llmcli.cli.output import page
from llmcli.cli.output.page import HtmlOutput
from llmcli.cli.output.tokens import LEVEL_LIMITS
from llmcli.engine.request import Finished, Token
from llmcli.sampling.params import SamplingParams

HOSTILE = [
    "</script>",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "&amp;",
    "\"'><!--",
    "]]>",
    "\x00\x1b",
]
FLOWER = "🌼".encode()
WORDS = ["Once", " upon", "\n", " ", FLOWER[:1], FLOWER[1:3], FLOWER[3:], *HOSTILE]
TOKENIZER = PieceTokenizer(WORDS)
PARAMS = SamplingParams(temperature=0.7, top_k=5, top_p=0.9)


def write_page(folder: Path, choices: list[tuple[int, float]], facts=None, **options: Any) -> Element:
    path = folder / "page.html"
    play(HtmlOutput(facts or make_facts(TOKENIZER), path, replace=True), make_events(TOKENIZER, choices, **options))
    return parse(path.read_text(encoding="utf-8"))


def spans(root: Element) -> list[tuple[str, str]]:
    """The id and text of each token's element, in the order of the page."""
    return [(str(element.attributes["id"]), element.text) for element in root.all("t")]


def test_hostile_text_is_inert_and_complete(tmp_path):
    first = len(WORDS) - len(HOSTILE)
    facts = make_facts(TOKENIZER, prompt="".join(HOSTILE))
    root = write_page(tmp_path, [(first + index, 0.5) for index in range(len(HOSTILE))], facts)
    shown = [*HOSTILE[:-1], "␀␛"]
    assert [text for _, text in spans(root)] == shown
    message, story = root.all("story")
    assert message.text == story.text == "".join(shown)
    assert root.all("title")[0].text.endswith(" · models/tiny")
    # No element and no script that is not in an empty page; control characters never reach the page.
    assert [element.name for element in root if element.name in ("img", "script")] == ["script", "script"]
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "<" not in text.split('id="data">')[1].split("</script>")[0]


def test_hostile_names_and_settings_are_inert(tmp_path):
    facts = make_facts(TOKENIZER)
    sources = {**facts.sampling.sources, "temperature": "preset <b>"}
    sampling = type(facts.sampling)(facts.sampling.params, sources)
    facts = type(facts)(**{**vars(facts), "name": "<i>\udcff", "sampling": sampling})
    root = write_page(tmp_path, [(0, 0.5)], facts)
    assert root.all("h1")[0].text == "<i>?"
    assert "preset <b>" in [cell.text for cell in root.all("td")]
    assert not root.all("i")
    assert not root.all("b")


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path):
    root = write_page(tmp_path, [(0, 0.5), (TOKENIZER.end_id, 0.1)], reason="eos")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    (policy,) = (item for item in root.all("meta") if item.attributes.get("http-equiv") == "Content-Security-Policy")
    style, script = root.all("style")[0].text, root.all("script")[-1].text
    hashes = [f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for part in (style, script)]
    assert policy.attributes["content"] == (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; form-action 'none'"
    )
    for element in root:
        assert not {"src", "href", "style", "srcdoc", "action"} & element.attributes.keys()
        assert not any(name.startswith("on") for name in element.attributes)


def test_the_data_are_the_events(tmp_path):
    choices = [(0, 0.6), (1, 0.3), (7, 0.01), (TOKENIZER.end_id, 0.2)]
    facts = make_facts(TOKENIZER, temperature=0.7, top_k=5, top_p=0.9)
    events = make_events(TOKENIZER, choices, params=PARAMS, reason="eos")
    play(HtmlOutput(facts, tmp_path / "page.html", replace=False), events)
    data = data_of(parse((tmp_path / "page.html").read_text()))
    tokens = data["samples"][0]["tokens"]
    events = [event for event in events if isinstance(event, Token)]
    assert len(tokens) == len(events)
    for token, event in zip(tokens, events, strict=True):
        inspection = event.inspection
        last = inspection.steps[-1]
        assert token["id"] == event.token_id
        assert token["p"] == pytest.approx(math.exp(inspection.chosen.logprob), rel=1e-3)
        assert token["drawn"] == pytest.approx(last.chosen_probability, rel=1e-3)
        assert token["of"] == TOKENIZER.vocab_size
        assert_pairs(
            token["alternatives"], [(item.token_id, math.exp(item.logprob)) for item in inspection.alternatives]
        )
        assert_pairs([token["likeliest"]], [(last.likeliest.token_id, last.likeliest.probability)])
        changed = [step for step in inspection.steps if step.changed]
        assert changed
        assert [data["steps"][step[0]]["name"] for step in token["steps"]] == [step.name for step in changed]
        for (_, removed, left, chance, likeliest), step in zip(token["steps"], changed, strict=True):
            assert (removed, left) == (step.num_removed, step.num_left)
            assert chance == pytest.approx(step.chosen_probability, rel=1e-3)
            assert_pairs(likeliest, [(item.token_id, item.probability) for item in step.removed])
    assert data["levels"] == list(LEVEL_LIMITS)
    assert {step["name"]: step["value"] for step in data["steps"]} == {
        "logit_bias": None, "sequence_bias": None, "begin_suppress": None, "eos_ban": None,
        "encoder_repetition_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "dry": None, "temperature": 0.7, "top_n_sigma": 0.0, "top_k": 5, "top_p": 0.9,
        "min_p": 0.0, "typical_p": 1.0, "xtc": None, "mirostat": None,
    }  # fmt: skip
    assert data["is_greedy"] is False
    mentioned = {pair[0] for token in tokens for pair in (*token["alternatives"], token["likeliest"])}
    mentioned |= {pair[0] for token in tokens for step in token["steps"] for pair in step[4]}
    assert {int(key) for key in data["pieces"]} == mentioned | {token["id"] for token in tokens}
    assert data["pieces"]["1"] == "·upon"
    assert data["pieces"][str(TOKENIZER.end_id)] == END


def assert_pairs(pairs: list[list[float]], expected: list[tuple[int, float]]) -> None:
    assert [pair[0] for pair in pairs] == [token_id for token_id, _ in expected]
    assert [pair[1] for pair in pairs] == pytest.approx([probability for _, probability in expected], rel=1e-3)


def test_every_token_has_one_element_tinted_and_titled(tmp_path):
    choices = [(0, 0.6), (1, 0.3), (3, 0.1), (0, 0.03), (2, 0.002), (TOKENIZER.end_id, 0.002)]
    root = write_page(tmp_path, choices, reason="eos")
    assert spans(root) == [
        ("token-1", "Once"), ("token-2", "upon"), ("token-3", " "), ("token-4", "Once"), ("token-5", "\n"),
        ("token-6", END),
    ]  # fmt: skip
    elements = root.all("t")
    assert [element.classes[1:] for element in elements] == [
        ["l0"], ["l1"], ["l2"], ["l3"], ["l4", "break"], ["l4", "unseen"],
    ]  # fmt: skip
    assert elements[1].attributes["title"] == "30.0% by the model, 30.0% when drawn"
    assert [element.attributes["data-n"] for element in elements] == ["1", "2", "3", "4", "5", "6"]
    # The space of " upon" is part of the text, but not of the tint.
    assert root.all("story")[0].text == f"Once upon Once\n{END}"


def test_a_character_of_several_tokens_is_one_element_of_its_last(tmp_path):
    root = write_page(tmp_path, [(0, 0.9), (4, 0.6), (5, 0.6), (6, 0.6), (0, 0.9)])
    assert spans(root) == [("token-1", "Once"), ("token-4", "🌼"), ("token-5", "Once")]
    assert root.all("t")[1].classes == ["t", "l1"]
    assert data_of(root)["pieces"]["4"] == "\\xf0"


def test_a_stop_string_shows_its_tokens_outside_the_text(tmp_path):
    root = write_page(tmp_path, [(0, 0.9), (1, 0.9), (0, 0.9)], stop_strings=(" uponOnce",))
    assert [(element.text, "unseen" in element.classes) for element in root.all("t")] == [
        ("Once", False), ("·upon", True), ("Once", True),
    ]  # fmt: skip
    assert "3 tokens, ended at a stop string" in root.all("about")[0].text


def test_several_samples_are_numbered_from_one(tmp_path):
    facts = make_facts(TOKENIZER, samples=3)
    output = HtmlOutput(facts, tmp_path / "page.html", replace=False)
    ends = [play_without_end(output, make_events(TOKENIZER, [(0, 0.5)] * 2, sample=sample)) for sample in (2, 0)]
    output.finish(ends[::-1])
    root = parse((tmp_path / "page.html").read_text())
    assert [heading.text for heading in root.all("h2")][:2] == ["Sample 1", "Sample 3"]
    assert [sample["number"] for sample in data_of(root)["samples"]] == [1, 3]
    assert [name for name, _ in spans(root)] == [
        "sample-1-token-1", "sample-1-token-2", "sample-3-token-1", "sample-3-token-2",
    ]  # fmt: skip


def play_without_end(output: HtmlOutput, events: list[Any]) -> Finished:
    for event in events:
        output.show(event)
    return events[-1]


def test_a_prompt_that_is_continued_begins_the_text(tmp_path):
    root = write_page(tmp_path, [(1, 0.9)], make_facts(TOKENIZER, prompt="Once", prompt_token_ids=(0,)))
    assert root.all("story")[0].text == "Once upon"
    assert not root.all("message")


def test_a_prompt_in_a_template_stands_apart(tmp_path):
    root = write_page(tmp_path, [(0, 0.9)], make_facts(TOKENIZER, prompt=" upon", prompt_token_ids=(0, 1)))
    assert [story.text for story in root.all("story")] == [" upon", "Once"]
    assert root.all("message")[0].all("h2")[0].text == "Prompt"


def test_the_head_names_settings_and_their_sources(tmp_path):
    root = write_page(tmp_path, [(0, 0.9)], make_facts(TOKENIZER, top_k=5))
    assert root.all("summary")[0].text == "seed 7 · temperature 1.0 · top_k 5 · top_p 1.0"
    rows = [[cell.text for cell in row if cell.name in ("th", "td")] for row in root.all("tr")]
    assert ["top_k", "5", "flag"] in rows
    assert ["min_p", "0.0", "default"] in rows
    assert len(rows) == 1 + 2 + len(vars(SamplingParams()))


def test_an_interrupted_run_gives_a_page_of_what_there_is(tmp_path):
    root = write_page(tmp_path, [], reason="interrupted")
    assert root.all("about")[0].text == "0 tokens, interrupted"
    assert not root.all("skyline")
    root = write_page(tmp_path, [(0, 0.5)], reason="interrupted")
    assert root.all("about")[0].text == "1 token, interrupted, 1.0 bits of surprise a token"


def test_nothing_generated_leaves_no_file(tmp_path):
    HtmlOutput(make_facts(TOKENIZER), tmp_path / "page.html", replace=False).finish([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrasts_with_everything_it_stands_on(scheme):
    style = (Path(page.__file__).parent / "report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.S)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[0] + (blocks[1] if scheme == "dark" else "")))
    pairs = [("ink", "paper"), ("ink", "raised"), ("ink", "funnel"), ("quiet", "paper"), ("quiet", "raised")]
    pairs += [("ink", f"mark-{level}") for level in range(1, 5)]
    for text, ground in pairs:
        light, dark = sorted((luminance(*bytes.fromhex(colors[name][1:])) for name in (text, ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
