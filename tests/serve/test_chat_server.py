"""`llmcli chat --server`: the texts of a local model, the behaviour of a chat, and servers that answer nonsense."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pexpect
import pytest
from here import run_here
from server import ROOT, ServerProcess, running_server
from tool_models import tool

from llmcli.cli import server_client
from llmcli.cli.server_client import ServerClient
from llmcli.errors import LLMCliError, ServerError, UsageError

KEY = "Zl7-secret"
TALK = ("--message", "Tell me of a snail.", "--message", "And then?", "--seed", 5, "--max-new-tokens", 25)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--api-key", KEY) as server:
        yield server


def run_chat(home: Path, *arguments: object, key: str | None = KEY) -> subprocess.CompletedProcess[str]:
    return run_here("chat", *arguments, LLMCLI_HOME=home, LLMCLI_API_KEY=key)


def refused(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert result.stdout == ""
    assert result.returncode == code
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


def test_a_server_tells_what_the_model_here_tells(server: ServerProcess, tmp_path: Path) -> None:
    here = run_chat(tmp_path, *TALK, "--device", "cpu", "--temperature", 0.9, "--top-k", 30)
    there = run_chat(tmp_path, *TALK, "--server", f"{server.url}/v1", "--temperature", 0.9, "--top-k", 30)
    assert there.returncode == here.returncode == 0
    assert there.stdout == here.stdout
    assert there.stderr == "(stopped at --max-new-tokens)\n" * 2
    assert run_chat(tmp_path, *TALK, "--server", server.url).stdout != here.stdout


def test_what_cannot_be_is_one_line(server: ServerProcess, tmp_path: Path) -> None:
    url = ("--server", server.url, "--message", "Hi")
    wrong_key = refused(run_chat(tmp_path, *url, key="wrong"))
    remedy = "give the server's key by --api-key or LLMCLI_API_KEY"
    assert wrong_key == f"{server.url}: the API key is missing or wrong; {remedy}"
    assert run_chat(tmp_path, *url, "--max-new-tokens", 1, "--api-key", KEY, key=None).returncode == 0
    assert (
        refused(run_chat(tmp_path, *url, "--top-p", 3)) == f"{server.url}: top_p is 3.0, expected a number > 0 and <= 1"
    )
    too_long = refused(run_chat(tmp_path, "--server", server.url, "--message", "snail " * 3000))
    assert too_long.endswith("shorten the prompt")
    elsewhere = refused(run_chat(tmp_path, "--server", f"{server.url}/there", "--message", "Hi"))
    assert elsewhere == f"{server.url}/there: there is nothing at '/there/v1/models'; check the path of --server"
    assert refused(run_chat(tmp_path, "--api-key", "x", "--message", "Hi")) == "--api-key needs --server URL"
    for flag in (["--draft", "off"], ["--json"]):
        said = refused(run_chat(tmp_path, *url, *flag))
        assert said == f"{flag[0]} cannot be used with --server"
    assert refused(run_chat(tmp_path, "some-model", *url)).startswith("MODEL and --server cannot be combined")


def test_an_address_must_lead_to_a_server() -> None:
    for address in ("here", "ftp://127.0.0.1", "http://", "http://[::1", "http://a..b:1"):
        with pytest.raises(UsageError, match=r"expected an address such as http://127\.0\.0\.1:8080"):
            ServerClient(address, None)
    words = r"^http://127\.0\.0\.1:9 cannot be reached: .*; start `llmcli serve` there, or check --server"
    with pytest.raises(ServerError, match=words):
        ServerClient("http://127.0.0.1:9/v1/", None).model()
    assert ServerClient("localhost:80", None).address == "http://localhost:80"
    assert ServerClient("127.0.0.1:9/v1", None).address == "http://127.0.0.1:9"
    with pytest.raises(UsageError, match="^--api-key is empty; give the server's key, or leave it out$"):
        ServerClient("http://127.0.0.1:9", "")
    for key in ("schlüssel", "a\nb", " ", "key "):
        with pytest.raises(UsageError, match="--api-key holds no usable key"):
            ServerClient("http://127.0.0.1:9", key)


def test_who_does_not_name_its_model_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "MODEL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LLMCliError, match=f"^{address} does not answer; try again"):
            ServerClient(address, None).model()


def test_someone_types(server: ServerProcess, tmp_path: Path) -> None:
    """Ctrl-C stops an answer and frees its row; commands work as usual, except those that need the model."""
    environment = {**os.environ, "TERM": "xterm-256color", "LLMCLI_HOME": str(tmp_path), "NO_COLOR": "1"}
    environment |= {"LLMCLI_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    command = ["-m", "llmcli", "chat", "--server", server.url, "--seed", "1"]
    child = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60, dimensions=(24, 100))

    def expect(pattern: str) -> str:
        while child.expect(["\x1b\\[6n", pattern]) == 0:
            child.send("\x1b[12;1R")
        return str(child.match[0])

    def enter(text: str, pattern: str) -> str:
        child.send(f"{text}\r")
        found = expect(pattern)
        expect("storyteller at http://")
        return found

    expect("storyteller at http://")
    assert "/probs" not in enter("/help", r"/params[^\r]*\r\n(?s:.*)/quit")
    enter("/probs", r"/probs needs a model that runs here; this chat is with a server")
    enter("/set overflow stop", r"a server decides what happens when the context is full")
    enter("/set max_new_tokens 400", r"max_new_tokens is 400")
    child.send("A snail and an owl.\r")
    expect(r"[a-z]+ [a-z]+ [a-z]+ [a-z]+ [a-z]+ [a-z]+")
    child.send("\x03")
    expect(r"\(stopped\)")
    expect("storyteller at http://")
    server.wait_for_line(r"/v1/chat/completions 499 ")
    enter("/set max_new_tokens 3", r"max_new_tokens is 3")
    enter("/regen", r"\(stopped at --max-new-tokens\)")
    enter("/params", r"max_tokens +3")
    enter("/undo", r"Removed: A snail and an owl.")
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@contextmanager
def odd_server(
    status: int, content: bytes, *, models: bytes = b'{"data": [{"id": "snail"}]}', asked: list[bytes] | None = None
) -> Iterator[str]:
    """A server with one answer to all requests but the one for its models; `asked` gets the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, models)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if asked is not None:
                asked.append(body)
            self._answer(status, content)

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *parts: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


PIECE = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, b"<html>welcome</html>\n", "the answer ended early; is it a server of OpenAI's protocol?"),
        (200, PIECE, "the answer ended early"),
        (200, PIECE + b"data: [1]\n\n", "it answers with something other than an object"),
        (200, PIECE + b"data: nonsense\n\n", "it answers with something other than JSON"),
        (200, PIECE + b'data: {"error": {"message": "the card is gone"}}\n\n', ": the card is gone"),
        (200, PIECE + b"x" * 5000, "a line of its answer is too long"),
        (502, b"<html>oops</html>", ": HTTP 502$"),
        (400, b'{"error": {"code": 5}}', ": HTTP 400$"),
        (401, b'{"detail": "Unauthorized"}', ": Unauthorized; give the server's key"),
        (400, b'{"object": "error", "message": "nope"}', ": nope$"),
        (200, b'data: {"choices": null}\n\n', "a piece of its answer has no text"),
        (200, b'data: {"choices": [{"delta": null}]}\n\n', "a piece of its answer has no text"),
        (200, b'data: {"choices": [{"delta": {"content": [1]}}]}\n\n', "a piece of its answer has no text"),
        (200, b'data: {"choices": [{"delta": {}, "finish_reason": {}}]}\n\n', "a piece of its answer has no text"),
        (200, b'data: {"choices": [{"delta": {"tool_calls": [3]}}]}\n\n', "a tool call of its answer has no function"),
        (
            200,
            b'data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": 3}}]}}]}\n\n',
            "a tool call of its answer has no function",
        ),
        (429, b'{"error": {"message": "too many texts"}}', ": too many texts$"),
        (500, b"x" * 5000, "its answer is too long"),
        (404, b'{"error": "no such model"}', ": no such model"),
    ],
)
def test_a_server_that_tells_nonsense(monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, words: str) -> None:
    monkeypatch.setattr(server_client, "_MAX_BYTES", 4000)
    with odd_server(status, content) as address:
        client = ServerClient(address, None)
        with pytest.raises(LLMCliError, match=words.replace("?", r"\?")) as caught:
            list(client.pieces({"messages": []}))
        assert caught.value.exit_code == (2 if 400 <= status < 500 and status != 429 else 4)
        client.close()


def test_a_server_that_ends_in_the_middle_of_an_answer() -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + PIECE)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"^{address} ended in the middle of its answer: .*; try again once it"):
            list(ServerClient(address, None).pieces({"messages": []}))
        thread.join()


@pytest.mark.parametrize(
    "models", ["{}", '{"data": []}', '{"data": [{"id": 5}]}', '{"data": [{"id": ""}]}', '{"data": [{"id": "a\\n"}]}']
)
def test_a_server_that_names_no_model(models: str) -> None:
    with odd_server(200, b"", models=models.encode()) as address:
        client = ServerClient(address, None)
        with pytest.raises(LLMCliError, match=r"its (list of )?model"):
            client.model()


def test_the_model_is_asked_for_by_its_name(tmp_path: Path) -> None:
    """OpenAI's protocol requires it; a null error is not an error."""
    asked: list[bytes] = []
    answer = PIECE.replace(b"{", b'{"error": null, ', 1) + b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    with odd_server(200, answer, asked=asked) as address:
        told = run_chat(tmp_path, "--server", address, "--message", "Tell.")
    assert (told.returncode, told.stdout, told.stderr) == (0, "Hi\n", "")
    (body,) = map(json.loads, asked)
    assert body == {"model": "snail", "messages": [{"role": "user", "content": "Tell."}], "stream": True}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_under_a_key_of_its_own(tmp_path: Path, key: str) -> None:
    """Its pieces come apart from the answer's, or with them, and nothing else is in the answer."""
    deltas = [{key: "A "}, {key: "snail?", "content": None}, {key: " Yes.", "content": "Hi"}, {"content": " you"}]
    answer = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas)
    with odd_server(200, f"{answer}data: [DONE]\n\n".encode()) as address:
        told = run_chat(tmp_path, "--server", address, "--message", "Tell.", "--thinking", "show")
    assert (told.returncode, told.stdout) == (0, "Hi you\n")
    assert told.stderr.strip() == "A snail? Yes."


def test_calls_of_a_server(tmp_path: Path) -> None:
    """Their pieces, as servers cut them; the result goes back with the call's id, its arguments as a text."""
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([tool("f"), tool("g")]))
    deltas = [
        {"content": "Wait."},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "}'}}]},
        {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '</tool_call>"}'}}]},
        {"tool_calls": [{"index": 1, "id": "y", "function": {"name": "g", "arguments": None}}]},
    ]
    pieces = [*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "tool_calls"}]
    answer = "".join(f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces)
    asked: list[bytes] = []
    with odd_server(200, f"{answer}data: [DONE]\n\n".encode(), asked=asked) as address:
        messages = ("--message", "Tell.", "--message", "1", "--message", "2")
        told = run_chat(tmp_path, "--server", address, "--tools", tools, *messages)
    shown = 'Wait.\nf({"a": "}</tool_call>"})\ng({})\n'
    assert (told.returncode, told.stdout, told.stderr) == (0, 2 * shown, "")
    first, second = map(json.loads, asked)
    assert first["tools"] == second["tools"] == [tool("f"), tool("g")]
    _, called, *results = second["messages"]
    assert called["content"] == "Wait."
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": "}</tool_call>"}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert [(one["role"], one["tool_call_id"], one["content"]) for one in results] == [
        ("tool", call["id"], result) for call, result in zip(called["tool_calls"], "12", strict=True)
    ]


def test_no_answer_is_an_error(tmp_path: Path) -> None:
    with odd_server(200, b"data: [DONE]\n\n") as address:
        assert refused(run_chat(tmp_path, "--server", address, "--message", "Hi"), 4) == f"{address} gave no answer"


def test_ctrl_c_ends_a_script(server: ServerProcess, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMCLI_HOME": str(tmp_path), "LLMCLI_API_KEY": KEY}
    command = [sys.executable, "-m", "llmcli", "chat", "--server", server.url, "--message", "Tell me of a snail."]
    chat = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert chat.stdout is not None
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    _, said = chat.communicate(timeout=60)
    assert chat.returncode == 130
    assert said == "(stopped)\n"
