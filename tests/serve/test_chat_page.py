"""The chat page in a real browser: it answers, colours, works by keyboard, fits, and talks only to its server."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, Browser, contrast
from raw_client import post
from server import ServerProcess, running_server

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

ASKED = "Tell me of a <b>snail</b> & an owl."
TEXT = "[...document.querySelectorAll('article')].at(-1).querySelector('.answer')"


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


def answers(browser: Browser) -> list[str]:
    """The texts of all answers on the page."""
    script = "[...document.querySelectorAll('article .answer')].map((one) => one.textContent)"
    return list(browser.run(script))


def press_button(browser: Browser, name: str) -> None:
    """Press the last button of that name."""
    browser.run(f"[...document.querySelectorAll('button')].findLast((one) => one.textContent === '{name}').click()")


def requests_of(browser: Browser) -> list[dict[str, Any]]:
    """The bodies of the page's requests since `record`."""
    return [json.loads(body) for body in browser.run("window.bodies")]


def record(browser: Browser) -> None:
    script = "const real = fetch; window.bodies = []; fetch = (url, how) => { bodies.push(how.body); "
    browser.run(f"(() => {{ {script} return real(url, how); }}; }})()")


def test_a_reload_keeps_the_chat_and_a_new_one_forgets_it(browser: Browser) -> None:
    browser.run("document.getElementById('settings').open = true")
    browser.run("document.getElementById('seed').focus()")
    browser.type("8")
    browser.run("document.getElementById('key').focus()")
    browser.type("open sesame")
    for question in (ASKED, "And then?"):
        ask(browser, question)
        wait_for_end(browser)
    script = "[...document.querySelectorAll('main, main *')].map((one) => [one.className, one.innerText])"
    before = browser.run(script)
    browser.reload()
    assert browser.run(script) == before
    assert browser.run("document.getElementById('seed').value") == "8"
    assert "sesame" not in browser.run("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")
    browser.run("document.querySelector('.t').focus()")
    assert " had " in browser.run("document.getElementById('look').textContent")
    record(browser)
    ask(browser, "Why?")
    wait_for_end(browser)
    (body,) = requests_of(browser)
    told = answers(browser)
    contents = [ASKED, told[0], "And then?", told[1], "Why?"]
    assert [message["content"] for message in body["messages"]] == contents
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    press_button(browser, "New chat")
    assert browser.run("document.activeElement.id") == "message"
    browser.reload()
    assert answers(browser) == []
    assert browser.problems == []


def test_a_reload_while_it_answers_keeps_what_is_there(browser: Browser) -> None:
    ask(browser, ASKED)
    browser.wait_for(f"{TEXT}.textContent.length > 3")
    browser.reload()
    (told,) = answers(browser)
    assert len(told) > 3
    assert browser.run(f"{TEXT}.parentElement.querySelector('.about').textContent") == "stopped"


def test_a_chat_that_is_too_large_loses_its_oldest_tints_first(browser: Browser) -> None:
    for question in (ASKED, "And then?"):
        ask(browser, question)
        wait_for_end(browser)
    script = """(() => {
        const real = Storage.prototype.setItem, limit = 0.8 * sessionStorage.getItem("llmcli-chat").length;
        Storage.prototype.setItem = function (name, text) {
            if (text.length > limit) throw new DOMException("full", "QuotaExceededError");
            real.call(this, name, text);
        };
    })()"""
    browser.run(script)
    before = answers(browser)
    browser.reload()
    assert answers(browser) == before
    count = "document.querySelectorAll('article:nth-of-type({}) .t').length"
    assert browser.run(count.format(2)) == 0
    assert browser.run(count.format(4)) > 10


def test_the_last_answer_is_made_again(browser: Browser) -> None:
    for question in (ASKED, "And then?"):
        ask(browser, question)
        wait_for_end(browser)
    before = answers(browser)
    browser.run("document.getElementById('seed').value = 3")
    record(browser)
    shown = "[...document.querySelectorAll('.redo')].map((one) => one.checkVisibility())"
    assert browser.run(shown) == [False, True]
    press_button(browser, "Regenerate")
    assert browser.run(shown) == [False, False]
    wait_for_end(browser)
    after = answers(browser)
    assert (after[0], len(after)) == (before[0], 2)
    assert after[1] != before[1]
    press_button(browser, "Regenerate")
    wait_for_end(browser)
    first, second = requests_of(browser)
    assert (first["seed"], second["seed"]) == (4, 5)
    assert first["messages"] == second["messages"]
    assert [message["content"] for message in first["messages"]] == [ASKED, before[0], "And then?"]


def test_a_system_prompt_comes_first(browser: Browser) -> None:
    record(browser)
    browser.run("document.getElementById('settings').open = true")
    browser.run("document.getElementById('system').focus()")
    browser.type("Be brief.")
    ask(browser, ASKED)
    wait_for_end(browser)
    browser.reload()
    assert browser.run("document.getElementById('system').value") == "Be brief."
    record(browser)
    ask(browser, "And then?")
    wait_for_end(browser)
    (body,) = requests_of(browser)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in body["messages"][1:]] == ["user", "assistant", "user"]


COPIES = """(async (hasClipboard) => {
    const got = [];
    document.addEventListener("copy", () => got.push(document.activeElement.value));
    Object.defineProperty(navigator, "clipboard", {
        value: hasClipboard ? { writeText: async (text) => got.push(text) } : undefined
    });
    const turn = newTurn("Code?");
    turn.text = "**Here** it is:\\n\\n```py\\nif x:\\n    y()\\n```\\n";
    show(turn);
    for (const button of document.querySelectorAll(".copy")) {
        button.click();
        await new Promise((done) => setTimeout(done, 20));
    }
    const names = [...document.querySelectorAll(".copy")].map((one) => one.textContent);
    return [got, names, document.getElementById("look").textContent];
})"""


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_answers_and_code_are_copied(browser: Browser, has_clipboard: bool) -> None:
    """As they were written; also where the browser has no clipboard, as on a page without https."""
    script = f"{COPIES}({json.dumps(has_clipboard)})"
    how = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
    got, names, said = browser.call("Runtime.evaluate", expression=script, **how)["result"]["value"]
    assert got == ["if x:\n    y()", "**Here** it is:\n\n```py\nif x:\n    y()\n```\n"]
    assert (names, said) == (["Copied", "Copied"], "Copied")
    browser.wait_for("document.querySelector('.code .copy').textContent === 'Copy code'")


def test_markdown_can_be_switched_off(browser: Browser) -> None:
    text = "**Bold** and\n\n- an item"
    browser.run(f"(() => {{ const turn = newTurn('?'); turn.text = {json.dumps(text)}; show(turn); }})()")
    assert browser.run("document.querySelector('strong').textContent") == "Bold"
    browser.run("document.getElementById('markdown').click()")
    assert browser.run(f"[{TEXT}.textContent, {TEXT}.children.length]") == [text, 0]
    browser.run("document.getElementById('markdown').click()")
    assert browser.run("document.querySelector('li').textContent") == "an item"


def test_reasoning_is_folded(browser: Browser) -> None:
    """As `reasoning_content`, which other servers and clients know."""
    browser.run(
        """(() => {
        const bytes = (text) => [...new TextEncoder().encode(text)];
        let logprob = -1;
        const token = (text) => {
            if (text === "</think>") logprob = -5;
            return { token: text, bytes: bytes(text), logprob, top_logprobs: [] };
        };
        const piece = (delta, tokens) => ({ choices: [{ delta, logprobs: { content: tokens.map(token) } }] });
        const told = [piece({ reasoning_content: "A guess: let" }, ["<think>", "A", " guess", ": let"]),
            piece({ reasoning_content: " me see", content: "A" }, [" me see", "</think>", "\\n\\n", "A"]),
            piece({ content: " guess" }, [" guess"]),
            { choices: [], usage: { completion_tokens: 6 }, seed: 1 }];
        const lines = told.map((one) => `data: ${JSON.stringify(one)}\\n\\n`).join("") + "data: [DONE]\\n\\n";
        fetch = async () => new Response(lines);
    })()"""
    )
    ask(browser, ASKED)
    wait_for_end(browser)
    assert answers(browser) == ["A guess"]
    assert browser.run("[...document.querySelectorAll('.answer .t')].map((one) => one.className)") == ["t l4", "t l4"]
    words = "[...document.querySelectorAll('{} .t')].map((one) => one.textContent)"
    assert browser.run(words.format(".answer")) == ["A", "guess"]
    assert browser.run(words.format(".reasoning")) == ["A", "guess", ": let", "me see"]
    assert browser.run("document.querySelector('.reasoning').innerText") == "Reasoning"
    browser.reload()
    assert browser.run(words.format(".reasoning")) == ["A", "guess", ": let", "me see"]
    record(browser)
    ask(browser, "Why?")
    wait_for_end(browser)
    assert [message["content"] for message in requests_of(browser)[0]["messages"]] == [ASKED, "A guess", "Why?"]


def test_a_key_that_is_asked_for_can_be_typed_at_once(tmp_path: Path) -> None:
    with running_server("--api-key", "sesame", "--max-new-tokens", 5) as server:
        browser = Browser(tmp_path / "profile")
        try:
            browser.call("Page.navigate", url=f"{server.url}/")
            browser.wait_for("document.readyState === 'complete' && document.title === 'storyteller'")
            ask(browser, ASKED)
            wait_for_end(browser)
            assert "key" in browser.run("document.querySelector('.fault').textContent")
            assert browser.run("document.activeElement.id") == "key"
            browser.type("sesame")
            press_button(browser, "Regenerate")
            wait_for_end(browser)
            assert browser.run("document.querySelector('.fault')") is None
            assert len(answers(browser)[0]) > 3
        finally:
            browser.close()


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
    for element in ("h1", ".legend", ".t", "h2", ".about", "#look", "textarea", "button", "#send", "summary", ".copy"):
        assert contrast(browser, element) >= 4.5, element
    for level in range(1, 5):
        assert contrast(browser, f".legend .l{level}") >= 4.5
    small = browser.run(
        "[...document.querySelectorAll('button')].filter((one) => !one.hidden && one.offsetHeight < 40).length"
    )
    assert small == 0
    assert browser.run("document.getElementById('send').getBoundingClientRect().bottom") <= 844


DRAW = """(tokens, text) => {
    const told = new Tokens(), body = document.createElement("div");
    tokens.forEach((token) => told.add(token));
    new Drawing({ text, tokens: told.list, reasoning: "" }, "text", body).draw();
    return [body.textContent, [...body.querySelectorAll(".t")].map((one) => one.textContent)];
}"""


def drawn(browser: Browser, parts: Sequence[bytes], text: str) -> Any:
    """The text of an answer on the page, and its tinted words."""
    tokens = [{"token": "x", "bytes": list(part), "logprob": -1, "top_logprobs": []} for part in parts]
    return browser.run(f"({DRAW})({json.dumps(tokens)}, {json.dumps(text)})")


def test_a_text_ends_before_its_stop_string(browser: Browser) -> None:
    """The tokens of a stop string were chosen, but are not shown."""
    parts = (b" One", b" tw", b"o", b" three")
    assert drawn(browser, parts, "One two three") == ["One two three", ["One", "tw", "o", "three"]]
    assert drawn(browser, parts, "One t") == ["One t", ["One", "t"]]


def test_reasoning_is_put_aside(browser: Browser, tmp_path: Path) -> None:
    """The rest is the answer, and the next turn has it alone."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}{% endfor %}{# </think> #}")
    with running_server("--chat-template", template, "--seed", 1) as server:
        browser.call("Page.navigate", url=f"{server.url}/")
        browser.wait_for("document.readyState === 'complete' && document.title === 'storyteller'")
        browser.run(
            "first = bodyFor; bodyFor = (turn) => JSON.stringify({...JSON.parse(first(turn)), regex: pattern}); 1"
        )
        patterns = {r"<think>\nWell\.\n</think>\n\nHi you\.": "Hi you.", r"<think>\n\n</think>Yes": "Yes"}
        for pattern, text in patterns.items():
            browser.run(f"pattern = {json.dumps(pattern)}; 1")
            ask(browser, ASKED)
            wait_for_end(browser)
            assert browser.run("turns.at(-1).text") == text
            assert browser.run(f"{TEXT}.textContent") == text
        assert "Well." in browser.run("document.querySelector('.reasoning').textContent")
        assert not browser.run("document.querySelector('.reasoning').open")


def test_a_character_of_several_tokens_is_one_word(browser: Browser) -> None:
    parts = (b"\x20\xf0", b"\x9f\xa6", b"\x8a", b"\x21")
    assert drawn(browser, parts, "\U0001f98a!") == ["\U0001f98a!", ["\U0001f98a", "!"]]


def test_tokens_that_do_not_tell_the_text_give_no_tints(browser: Browser) -> None:
    assert drawn(browser, (b"One", b" two"), "Another text") == ["Another text", []]
    thoughts = (b"</think>", b"\n\n", b"So", b" it is")
    assert drawn(browser, thoughts, "So it is") == ["So it is", ["So", "it is"]]


def test_words_in_markdown_keep_their_tints(browser: Browser) -> None:
    parts = (b"- **Tw", b"o** words,", b" `co", b"de`\n", b"- end")
    text = "- **Two** words, `code`\n- end"
    assert drawn(browser, parts, text) == ["Two words, codeend", ["Tw", "o", "words,", "co", "de", "end"]]
