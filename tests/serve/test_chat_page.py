"""The chat page in a real browser: it answers, colours, works by keyboard, fits, and talks only to its server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import BROWSER, Browser, contrast
from raw_client import post
from server import ServerProcess, running_server

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

ASKED = "Tell me of a <b>snail</b> & an owl."
TEXT = "[...document.querySelectorAll('article')].at(-1).querySelector('.text')"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--seed", 5, "--max-new-tokens", 60) as server:
        yield server


@pytest.fixture
def browser(server: ServerProcess, tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    browser.call("Page.navigate", url=f"{server.url}/")
    browser.wait_for("document.readyState === 'complete' && document.title === 'storyteller'")
    yield browser
    browser.close()


def ask(browser: Browser, text: str) -> None:
    """By keyboard alone; wait until the answer begins."""
    count = browser.run("document.querySelectorAll('article').length")
    browser.run("document.getElementById('message').focus()")
    browser.type(text)
    browser.press("Enter", "\r")
    browser.wait_for(f"document.querySelectorAll('article').length === {count + 2}")


def wait_for_end(browser: Browser) -> None:
    browser.wait_for("!document.getElementById('send').hidden")


def test_a_conversation(server: ServerProcess, browser: Browser) -> None:
    assert browser.run("document.activeElement.id") == "message"
    messages: list[dict[str, str]] = []
    for question in (ASKED, "And then?"):
        ask(browser, question)
        wait_for_end(browser)
        messages.append({"role": "user", "content": question})
        _, answer = post(server.port, "/v1/chat/completions", {"messages": messages})
        text = answer["choices"][0]["message"]["content"]
        assert browser.run(f"{TEXT}.textContent") == text
        messages.append({"role": "assistant", "content": text})
        assert browser.run(f"{TEXT}.parentElement.querySelector('.fault')") is None
        about = browser.run(f"{TEXT}.parentElement.querySelector('.about').textContent")
        assert f"{answer['usage']['completion_tokens']} tokens, seed 5" in about
    assert browser.run("document.querySelector('article .text').textContent") == ASKED
    assert browser.run("document.querySelector('main b')") is None
    assert all(url.startswith(server.url) for url in browser.requests), browser.requests
    assert len(browser.requests) >= 3
    assert browser.problems == []


def test_words_are_coloured_by_their_probability_and_tell_it(server: ServerProcess, browser: Browser) -> None:
    ask(browser, ASKED)
    wait_for_end(browser)
    body = {"messages": [{"role": "user", "content": ASKED}], "logprobs": True, "top_logprobs": 5}
    _, answer = post(server.port, "/v1/chat/completions", body)
    tokens = answer["choices"][0]["logprobs"]["content"]
    shares = [2.718281828459045 ** token["logprob"] for token in tokens]
    levels = [sum(share < limit for limit in (0.5, 0.2, 0.05, 0.01)) for share in shares]
    assert browser.run("[...document.querySelectorAll('.t')].map((one) => Number(one.className.at(-1)))") == levels
    browser.run("document.querySelector('.t').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    assert browser.run("document.activeElement === document.querySelectorAll('.t')[3]")
    shown = browser.run("document.getElementById('look').textContent")
    assert shown.startswith(f"{json.dumps(tokens[3]['token'], ensure_ascii=False)} had ")
    assert f"{100 * shares[3]:.1f}%" in shown or "99.9%" in shown
    others = [item["token"] for item in tokens[3]["top_logprobs"] if item["token"] != tokens[3]["token"]]
    assert all(json.dumps(other, ensure_ascii=False) in shown for other in others)
    browser.press("ArrowLeft")
    assert browser.run("document.activeElement === document.querySelectorAll('.t')[2]")


def test_escape_stops_an_answer_and_the_next_one_comes(browser: Browser) -> None:
    ask(browser, ASKED)
    browser.wait_for(f"{TEXT}.textContent.length > 3")
    browser.press("Escape")
    wait_for_end(browser)
    assert "stopped" in browser.run(f"{TEXT}.parentElement.querySelector('.about').textContent")
    ask(browser, "And then?")
    wait_for_end(browser)
    assert browser.run(f"{TEXT}.textContent.length") > 20


def test_the_end_stays_in_view_until_the_reader_scrolls_up(browser: Browser) -> None:
    browser.look(390, 400, "light")
    page = "document.documentElement"
    for _ in range(2):
        ask(browser, ASKED)
        wait_for_end(browser)
    assert browser.run(f"{page}.scrollTop") > 200
    assert browser.run(f"{page}.scrollHeight - {page}.scrollTop - innerHeight") <= 1
    ask(browser, ASKED)
    browser.run(f"{page}.scrollTop = 50")
    wait_for_end(browser)
    assert browser.run(f"{page}.scrollTop") == 50


def test_an_error_is_shown_as_text(browser: Browser) -> None:
    browser.run("document.getElementById('seed').value = '-3'")
    ask(browser, ASKED)
    wait_for_end(browser)
    assert browser.run(f"{TEXT}.parentElement.querySelector('.fault').textContent") == "seed is -3, expected >= 0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_can_be_read(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    browser.look(width, 844, scheme)
    ask(browser, "Tell me of a " + "veryverylong" * 20)
    wait_for_end(browser)
    browser.look(width, 844, scheme, tmp_path / "page.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    for element in ("h1", ".legend", ".t", "h2", ".about", "#look", "textarea", "button", "#send", "summary"):
        assert contrast(browser, element) >= 4.5, element
    for level in range(1, 5):
        assert contrast(browser, f".legend .l{level}") >= 4.5
    small = browser.run(
        "[...document.querySelectorAll('button')].filter((one) => !one.hidden && one.offsetHeight < 40).length"
    )
    assert small == 0
    assert browser.run("document.getElementById('send').getBoundingClientRect().bottom") <= 844


def test_a_text_ends_before_its_stop_string(browser: Browser) -> None:
    """The tokens of a stop string were chosen, but are not shown."""
    tokens = [{"token": text, "bytes": list(text.encode()), "logprob": 0} for text in (" One", " tw", "o", " three")]
    script = f"""(() => {{
        const body = document.createElement("div"), words = new Words(body);
        for (const token of {json.dumps(tokens)}) words.add(token);
        const whole = body.textContent;
        words.cut("One t");
        return [whole, body.textContent, body.querySelectorAll(".t").length];
    }})()"""
    assert browser.run(script) == ["One two three", "One t", 2]


def test_reasoning_is_put_aside(browser: Browser, tmp_path: Path) -> None:
    """The rest is the answer, and the next turn has it alone."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}{% endfor %}{# </think> #}")
    with running_server("--chat-template", template, "--seed", 1) as server:
        browser.call("Page.navigate", url=f"{server.url}/")
        browser.wait_for("document.readyState === 'complete' && document.title === 'storyteller'")
        browser.run("first = asked; asked = () => JSON.stringify({...JSON.parse(first()), regex: pattern}); 1")
        patterns = {r"<think>\nWell\.\n</think>\n\nHi you\.": "Hi you.", r"<think>\n\n</think>Yes": "Yes"}
        for pattern, text in patterns.items():
            browser.run(f"pattern = {json.dumps(pattern)}; 1")
            ask(browser, ASKED)
            wait_for_end(browser)
            assert browser.run("messages.at(-1).content") == text
            shown = f"[...{TEXT}.childNodes].filter((one) => one.tagName !== 'DETAILS').map((one) => one.textContent)"
            assert "".join(browser.run(shown)) == text
        assert "Well." in browser.run("document.querySelector('.text details').textContent")
        assert not browser.run("document.querySelector('.text details').open")


def test_a_character_of_several_tokens_is_one_word(browser: Browser) -> None:
    parts = [[0x20, 0xF0], [0x9F, 0xA6], [0x8A], [0x21]]
    tokens = [{"token": "x", "bytes": part, "logprob": -1} for part in parts]
    script = f"""(() => {{
        const body = document.createElement("div"), words = new Words(body);
        for (const token of {json.dumps(tokens)}) words.add(token);
        return [...body.querySelectorAll(".t")].map((one) => one.textContent);
    }})()"""
    assert browser.run(script) == ["🦊", "!"]
