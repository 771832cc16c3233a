"""The roads of a page: a list and data with what the engine found, and nothing in them runs."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from html_tree import Element, data_of, parse
from inspected_runs import END, PieceTokenizer, make_events, make_facts, play
from results import Llmcli, Result

from llmcli.cli.output.page import HtmlOutput
from llmcli.engine import roads as engine_roads
from llmcli.engine.roads import Fork, Road, RoadEnd, RoadToken

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'><b>", "&lt;", "\x00\x1b]0;x\x07"]
TOKENIZER = PieceTokenizer(["Once", " upon", "\n", "!", *HOSTILE])


def road(place: int, *token_ids: int, sample: int = 0, end: RoadEnd = "tokens", chance: float = 0.25) -> Road:
    tokens = [
        RoadToken(token_id, chance, TOKENIZER.token_bytes(token_id).decode(errors="replace")) for token_id in token_ids
    ]
    return Road(Fork(sample, place, token_ids[0], chance), tuple(tokens), end)


def write_page(folder: Path, roads: list[Road], samples: int = 1, **options: Any) -> Element:
    path = folder / "page.html"
    seen: list[Any] = []

    def find_roads(texts: Any) -> list[Road]:
        seen.append(texts)
        return roads

    output = HtmlOutput(make_facts(TOKENIZER, samples=samples), path, replace=True, find_roads=find_roads)
    events = [
        event
        for sample in range(samples)
        for event in make_events(TOKENIZER, [(0, 0.5), (1, 0.3)], sample=sample, **options)
    ]
    play(output, events)
    if seen:
        (texts,) = seen
        assert {key: [choice.chosen.token_id for choice in choices] for key, choices in texts.items()} == {
            sample: [0, 1] for sample in range(samples)
        }
    return parse(path.read_text(encoding="utf-8"))


def test_a_road_is_listed_marked_and_in_the_data(tmp_path: Path) -> None:
    root = write_page(tmp_path, [road(1, 3, 0, 1, chance=0.4567), road(0, 1, TOKENIZER.end_id, end="eos")])
    assert data_of(root)["samples"][0]["roads"] == [
        {"place": 1, "id": 3, "chance": 0.4567, "words": [["!", 0.4567], ["Once", 0.4567], [" upon", 0.4567]],
         "end": "…"},
        {"place": 0, "id": 1, "chance": 0.25, "words": [[" upon", 0.25], [END, 0.25, 1]],
         "end": "the model would have ended here"},
    ]  # fmt: skip
    assert [element.classes for element in root.all("t")] == [["t", "l0", "fork"], ["t", "l1", "fork"]]
    assert [link.text for link in root.all("road-link")] == ["token 1: Once → ·upon 25.0%", "token 2: ·upon → ! 45.7%"]
    assert [link.attributes["data-road"] for link in root.all("road-link")] == ["1", "0"]
    assert [text.text for text in root.all("road-text")] == ["upon the model would have ended here", "!Once upon …"]
    assert {"1", "3"} <= data_of(root)["pieces"].keys()


def test_without_roads_there_is_neither_list_nor_mark(tmp_path: Path) -> None:
    root = write_page(tmp_path, [])
    assert not root.all("roads")
    assert not root.all("fork")
    assert data_of(root)["samples"][0]["roads"] == []


def test_an_interrupted_text_has_no_roads(tmp_path: Path) -> None:
    assert not write_page(tmp_path, [road(0, 1)], reason="interrupted").all("roads")


def test_each_sample_has_its_roads(tmp_path: Path) -> None:
    root = write_page(tmp_path, [road(0, 1, sample=1), road(1, 3, sample=0), road(1, 2, sample=1)], samples=2)
    found = [[each["id"] for each in sample["roads"]] for sample in data_of(root)["samples"]]
    assert found == [[3], [1, 2]]
    assert [[link.text for link in part.all("road-link")] for part in root.all("roads")] == [
        ["token 2: ·upon → ! 25.0%"],
        ["token 1: Once → ·upon 25.0%", "token 2: ·upon → ⏎ 25.0%"],
    ]


def test_hostile_roads_are_inert_and_complete(tmp_path: Path) -> None:
    first = TOKENIZER.end_id - len(HOSTILE)
    ids = range(first, TOKENIZER.end_id)
    root = write_page(tmp_path, [road(0, *ids), *(road(1, token_id) for token_id in ids)])
    shown = "".join(HOSTILE).replace("\x00\x1b", "␀␛").replace("\x07", "␇")
    assert root.all("road-text")[0].text == f"{shown} …"
    assert [element.name for element in root if element.name in ("img", "script")] == ["script", "script"]
    assert data_of(root)["samples"][0]["roads"][0]["words"] == [[text, 0.25] for text in HOSTILE]
    assert not any(name.startswith("on") for element in root for name in element.attributes)
    text = (tmp_path / "page.html").read_text()
    assert "<" not in text.split('id="data">')[1].split("</script>")[0]
    assert not {"\x00", "\x1b", "\x07"} & set(text)


# The command


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> Callable[..., tuple[Result, Element]]:
    def call(*flags: object) -> tuple[Result, Element]:
        path = tmp_path / "page.html"
        result = llmcli("generate", "ab", "-m", tiny_llama, "--seed", 3, "--html", path, "--force", *flags)
        return result, parse(path.read_text(encoding="utf-8"))

    return call


def test_the_same_command_makes_the_same_page(generate: Callable[..., tuple[Result, Element]], tmp_path: Path) -> None:
    flags = ("--max-new-tokens", 30, "-n", 2, "--roads", 5)
    first, root = generate(*flags)
    page = (tmp_path / "page.html").read_bytes()
    second, _ = generate(*flags)
    assert (tmp_path / "page.html").read_bytes() == page
    plain, _ = generate(*flags[:-2])
    assert first.stdout == second.stdout == plain.stdout
    assert first.exit_code == 0
    assert sum(len(sample["roads"]) for sample in data_of(root)["samples"]) == 5
    chances = [each["chance"] for sample in data_of(root)["samples"] for each in sample["roads"]]
    assert max(chances) <= 1
    for sample in data_of(root)["samples"]:
        for each in sample["roads"]:
            token = sample["tokens"][each["place"]]
            assert each["id"] != token["id"]
            assert each["chance"] + token["drawn"] <= 1.001


def test_fewer_roads_than_asked_for_are_a_line(generate: Callable[..., tuple[Result, Element]]) -> None:
    result, root = generate("--max-new-tokens", 3, "--roads", 2, "--top-k", 1)
    assert "roads: 0, as no other token could have been drawn\n" in result.stderr
    assert result.exit_code == 0
    assert not root.all("roads")


@pytest.mark.parametrize("num_steps", [0, 25])
def test_ctrl_c_during_roads_writes_the_page_with_those_so_far(
    generate: Callable[..., tuple[Result, Element]], monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    whole, complete = generate("--max-new-tokens", 40, "--roads", 4, "--ignore-eos")
    steps = engine_roads.Roads.steps

    def interrupted(self: engine_roads.Roads) -> Any:
        every = steps(self)
        for number in count():
            if number == num_steps:
                raise KeyboardInterrupt
            next(every)
            yield

    monkeypatch.setattr(engine_roads.Roads, "steps", interrupted)
    result, root = generate("--max-new-tokens", 40, "--roads", 4, "--ignore-eos")
    assert result.exit_code == 130
    assert result.stdout == whole.stdout
    found, expected = (data_of(page)["samples"][0]["roads"] for page in (root, complete))
    assert f"interrupted; roads on the page: {len(found)} of 4\n" in result.stderr
    assert len(expected) == 4
    assert found != expected
    for part, all_of_it in zip(found, expected, strict=False):
        assert part["words"] == all_of_it["words"][: len(part["words"])]
        assert part["end"] in (all_of_it["end"], "interrupted")
    assert bool(found) == bool(num_steps)


def test_roads_need_a_page(llmcli: Llmcli) -> None:
    llmcli("generate", "a", "--roads", 3).expect_error(2, "--roads needs --html FILE")
    llmcli("generate", "a", "--html", "x.html", "--roads", 0).expect_error(2, "--roads")
