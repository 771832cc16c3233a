"""The pages' scripts in a real browser, if there is one: the effect of clicks and keys.

A browser without a driver shows its state only by dumping the page, so the test's script writes its findings to the
title. It runs in a copy without the content security policy; the page as it is must run its own script.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from inspected_runs import PieceTokenizer, make_events, make_facts, play

from llmcli.cli.output.page import HtmlOutput
from llmcli.cli.output.page_diff import DiffFacts, render_diff_page
from llmcli.engine.roads import Fork, Road, RoadToken
from llmcli.measure.evaluate import Alternative, DiffToken, verdict

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

HOSTILE = "<img src=x onerror=document.title='hit'></script>"
TOKENIZER = PieceTokenizer(["Once", " upon", " a", ", then", HOSTILE, "\n"])
HELPERS = """
const find = (name) => document.querySelector(name);
const all = (name) => [...document.querySelectorAll(name)];
const key = (name) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
// A browser without a window may not have the focus itself yet: then it keeps the event for later.
const focus = (element) => {
  element.focus();
  if (!document.hasFocus()) element.dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
};
const text = () => find(".story[data-sample]").textContent;
"""


def dump(path: Path, profile: Path) -> str:
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        f"--user-data-dir={profile}",
    ]
    assert BROWSER is not None
    command = [BROWSER, *flags, "--window-size=390,844", "--dump-dom", f"file://{path}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def find_out(page: Path, script: str) -> Any:
    """The value that the script returns, which runs once the page has loaded."""
    content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    tail = (
        f"<script>{HELPERS}try {{ document.title = JSON.stringify((() => {{{script}}})()); }} "
        "catch (e) { document.title = e.stack; }</script></body>"
    )
    copy = page.with_name("copy.html")
    copy.write_text(content.replace("</body>", tail), encoding="utf-8")
    match = re.search(r"<title>(.*?)</title>", dump(copy, page.parent / "profile"), re.S)
    assert match is not None
    return json.loads(html.unescape(match[1]))


@pytest.fixture
def roads_page(tmp_path: Path) -> Path:
    def road(place: int, *ids: int) -> Road:
        tokens = [RoadToken(token_id, 0.3, TOKENIZER.token_bytes(token_id).decode()) for token_id in ids]
        return Road(Fork(0, place, ids[0], 0.3), tuple(tokens), "tokens")

    path = tmp_path / "page.html"
    roads = [road(1, 3, 2), road(1, 4, 4), road(3, 2, 0)]
    output = HtmlOutput(make_facts(TOKENIZER), path, replace=True, find_roads=lambda texts: roads)
    play(output, make_events(TOKENIZER, [(0, 0.5), (1, 0.4), (2, 0.4), (5, 0.2), (0, 0.4)], num_alternatives=7))
    return path


def test_the_script_runs_under_the_policy(roads_page: Path) -> None:
    shown = dump(roads_page, roads_page.parent / "profile")
    assert '<html lang="en" class="interactive">' in shown
    assert "<title>hit</title>" not in shown


def test_a_road_is_taken_and_left(roads_page: Path) -> None:
    found = find_out(
        roads_page,
        """
        const before = find("main").innerHTML;
        const token = find("#token-2");
        token.click();
        const names = all("#panel .take").map((button) => button.textContent);
        const takes = all("#panel .take");
        takes[names.indexOf(", then")].click();
        const first = [find(".road").textContent, text(), takes.filter((one) => one.ariaPressed === "true").length,
          all(".passed").map((one) => one.id), find(".position").textContent];
        takes[names.findIndex((name) => name.startsWith("<img"))].click();
        const second = [find(".road").textContent, all(".road").length, all("img").length];
        document.activeElement.blur();
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        const left = [all(".road").length, text(), all(".passed").length, find(".view").hidden];
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
        const closed = find(".view").hidden;
        const clean = (markup) => markup.replace(/ (tabindex|aria-[a-z]+)="[^"]*"/g, "");
        return { names, first, second, left, closed, same: clean(find("main").innerHTML) === clean(before) };
        """,
    )
    whole = "Once upon a\nOnce"
    assert sorted(found["names"]) == sorted([", then", HOSTILE])
    # The space before "upon" is that token's own; the road after "Once" begins without it.
    assert found["first"][:3] == [", then a …", "Once, then a …what was drawn instead" + whole.removeprefix("Once"), 1]
    assert found["first"][3:] == [["token-2", "token-3", "token-4", "token-5"], "token 2 of 5, the road of , then"]
    assert found["second"] == [f"{HOSTILE}{HOSTILE} …", 1, 0]
    assert found["left"] == [0, whole, 0, False]
    assert found["closed"] is True
    assert found["same"] is True


def test_keys_walk_the_text_and_its_roads(roads_page: Path) -> None:
    found = find_out(
        roads_page,
        """
        focus(find("#token-1"));
        key("Enter");
        const none = all(".road").length;
        key("ArrowRight");
        const shown = [];
        for (let turn = 0; turn < 3; turn += 1) {
          key("Enter");
          shown.push(find(".road")?.textContent ?? null);
        }
        key("Enter");
        key("ArrowRight");
        const moved = [all(".road").length, location.hash];
        return { none, shown, moved };
        """,
    )
    assert found == {"none": 0, "shown": [", then a …", f"{HOSTILE}{HOSTILE} …", None], "moved": [0, "#token-3"]}


def test_the_list_takes_roads_and_the_page_is_as_wide_as_the_window(roads_page: Path) -> None:
    found = find_out(
        roads_page,
        """
        all(".road-link")[2].click();
        const road = find(".road").textContent;
        const hover = (name, kind) =>
          find(name).dispatchEvent(new PointerEvent(kind, { pointerType: "mouse", bubbles: kind === "pointerover" }));
        hover("#token-1", "pointerover");
        const hovered = find(".position").textContent;
        hover(".story[data-sample]", "pointerleave");
        find("#token-4").click();
        const stays = [hovered, find(".position").textContent, all(".road").length];
        const pressed = all(".road-link").map((one) => one.ariaPressed);
        all(".road-link")[2].click();
        return { road, stays, pressed, gone: all(".road").length, hash: location.hash,
          over: document.documentElement.scrollWidth - document.documentElement.clientWidth };
        """,
    )
    # A glance at another token leaves the road where it is, and so does a click on its own place.
    assert found.pop("stays") == ["token 1 of 5", "token 4 of 5, the road of ·a", 1]
    assert found.pop("pressed") == ["false", "false", "true"]
    assert found == {"road": " aOnce …", "gone": 0, "hash": "#token-4", "over": 0}


def test_the_panel_of_a_diff_names_both_choices(tmp_path: Path) -> None:
    tokens = [
        DiffToken(1, 0.9, 0.8, 1, 0.01, (Alternative(1, 0.9, 0.8),)),
        DiffToken(2, 0.6, 0.25, 4, 0.7, (Alternative(2, 0.6, 0.25), Alternative(4, 0.125, 0.5))),
    ]
    page = tmp_path / "diff.html"
    page.write_text(render_diff_page(DiffFacts("a", "b", "CPU", "Once", (0,), TOKENIZER), tokens, verdict(tokens)))
    found = find_out(
        page,
        """
        focus(find("#token-1"));
        const agreed = find(".choices").textContent;
        key("ArrowRight");
        const rows = all(".alternatives li").map((row) => row.innerText.replace(/\\s+/g, " ").trim());
        return { agreed, differs: find(".choices").textContent, rows, first: find(".by-first").textContent,
          second: find(".by-second").textContent, kl: find(".kl").textContent, images: all("img").length };
        """,
    )
    assert found == {
        "agreed": "Both choose ·upon.",
        "differs": f"A chose ·a, B would choose {HOSTILE}.",
        "rows": ["·a A’s choice A 60.0%", "B 25.0%", f"{HOSTILE} A 12.5%", "B’s choice B 50.0%"],
        "first": "60.0%", "second": "25.0%", "kl": "0.7", "images": 0,
    }  # fmt: skip
