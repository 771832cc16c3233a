"""The command: who may connect, how it ends, and refusals before a weight is read."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from here import run_here
from raw_client import get, open_socket, post, read_answer, request_bytes
from safetensors.torch import load_file
from server import ROOT, ServerProcess, running_server
from tiny_models import write_broken_llama, write_tiny_llama

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
STORY = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 20}
LONG = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 300, "ignore_eos": True, "stream": True}
KEY = "Zl7-secret"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(f"{KEY}\n")
    flags = ("--temperature", 0, "--max-new-tokens", 7, "--log-contents")
    with running_server("--api-key-file", path, "--cors-origin", "https://example.org", *flags) as server:
        yield server


def held_by(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}


def refused(*arguments: object) -> str:
    """The message of `serve` when it does not start."""
    result = run_here("serve", "--device", "cpu", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("Using the built-in storyteller"))
    return line.removeprefix("error: ")


@pytest.mark.parametrize("header", ["", "Authorization: Bearer wrong\r\n", f"Authorization: Basic {KEY}\r\n"])
def test_without_the_key_nobody_comes_in(guarded: ServerProcess, header: str) -> None:
    for path in (COMPLETE, "/tokenize", "/v1/embeddings"):
        status, answer = post(guarded.port, path, STORY, more=header)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert get(guarded.port, "/metrics", more=header)[0] == 401
    assert get(guarded.port, "/health", more=header)[0] == 200


def test_with_the_key_the_servers_own_flags_hold(guarded: ServerProcess) -> None:
    more = f"Authorization: Bearer {KEY}\r\n"
    status, first = post(guarded.port, COMPLETE, {"prompt": "The cloud"}, more=more)
    _, second = post(guarded.port, COMPLETE, {"prompt": "The cloud"}, more=more)
    assert status == 200
    assert first["seed"] != second["seed"]
    assert first["choices"] == second["choices"]  # temperature 0
    assert first["usage"]["completion_tokens"] == 7
    guarded.wait_for_line(r'prompt \["The cloud"\]')
    schema = {"type": "string", "maxLength": 3, "format": "horoscope"}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "response_format": held_by(schema)}
    assert post(guarded.port, "/v1/chat/completions", asked, more=more)[0] == 200
    guarded.wait_for_line(r"POST /v1/chat/completions 200 .* 1 of the schema's keywords and formats bind nothing")
    guarded.wait_for_line(r'schema \[".*horoscope.*"\]')
    assert KEY not in "".join(guarded.lines)


def test_only_the_named_site_may_ask_from_a_browser(guarded: ServerProcess) -> None:
    for origin, is_allowed in (("https://example.org", True), ("https://evil.example", False)):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", COMPLETE, headers={**headers, "Access-Control-Request-Headers": "authorization"})
        answer = connection.getresponse()
        assert (answer.getheader("access-control-allow-origin") == origin) == is_allowed
        connection.close()


def test_the_first_line_has_the_memory(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    config = json.loads((model / "config.json").read_text())
    numbers = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    tokens = 3 * 64
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    keys = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * tokens
    with running_server("-m", model, "--rows", 3, "--context", 64, "--dtype", "float32") as server:
        memory = f"weights {4 * numbers / 1024:.1f} KiB + KV cache {2 * 4 * keys / 1024:.1f} KiB"
        server.wait_for_line(re.escape(f"3 rows, context 64, {memory} for {tokens} tokens in float32\n"))


WRONG = [
    ("/v1/chat/completions", {"messages": "Kaspar 1"}, "messages", "param messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"a": "Kaspar 2"}}]}, "messages[0].content", ""),
    (COMPLETE, {"prompt": {"a": "Kaspar 3"}}, "prompt", "param prompt"),
    (COMPLETE, {**STORY, "choice": [{"a": "Kaspar 4"}]}, "choice", "param choice"),
    (COMPLETE, {**STORY, "model": "Kaspar 5"}, "model", "param model, code model_not_found"),
    ("/tokenize", {"prompt": ["Kaspar 6"]}, "prompt", "param prompt"),
]


def test_a_log_has_no_contents_and_a_refusal_is_told_in_full(guarded: ServerProcess) -> None:
    """A host must be ours; standard input may be closed."""
    more = f"Authorization: Bearer {KEY}\r\n"
    with running_server(close_stdin=True) as server:
        assert post(server.port, COMPLETE, {**STORY, "prompt": "Kaspar the snail"})[0] == 200
        for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403)):
            assert get(server.port, "/v1/models", host=host)[0] == status
        assert (
            post(server.port, COMPLETE, {**STORY, "response_format": held_by({"const": "a", "horoscope": 1})})[0] == 200
        )
        status, told = post(server.port, COMPLETE, STORY, more="Origin: https://evil.example\r\n")
        assert status == 200  # a browser hides it: there is no CORS header, and JSON needs a preflight request
        for path, body, param, words in WRONG:
            status, answer = post(server.port, path, body)
            assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)
            assert "Kaspar" in answer["error"]["message"]
            server.wait_for_line(rf"POST {path} {status} \S+ s, {words or 'param'}")
            assert post(guarded.port, path, body, more=more) == (status, answer)
            guarded.wait_for_line(re.escape(answer["error"]["message"]))
        assert post(server.port, COMPLETE, b'{"prompt": "Kaspar" 7}')[0] == 400
        assert server.end() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
    said = "".join(server.lines)
    for content in ("Kaspar", "horoscope", told["choices"][0]["text"].strip()):
        assert content not in said
    assert " 200 " in said
    assert re.search(r"GET /v1/models 403 \S+ s, the host 'evil.example' is not served", said)


def start_long(server: ServerProcess, **changes: Any) -> socket.socket:
    connection = open_socket(server.port, seconds=60)
    connection.sendall(request_bytes(COMPLETE, json.dumps({**LONG, **changes}).encode()))
    assert connection.recv(1)  # the text has begun
    return connection


def test_a_signal_lets_texts_end() -> None:
    with running_server() as server:
        connection = start_long(server, max_tokens=120)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(OSError):  # noqa: PT011
            open_socket(server.port)
        rest = b""
        while part := connection.recv(65536):
            rest += part
        assert b"data: [DONE]" in rest
        assert server.end(0) == 0


@pytest.mark.parametrize("grace", [0.5, 60])
def test_what_an_end_cuts_off_is_told_and_logged(grace: float) -> None:
    """By the grace, or by a second signal, which does not wait: a stream, a whole answer, and a body that comes."""
    with running_server("--grace", grace) as server:
        stream, whole = start_long(server, max_tokens=900), open_socket(server.port, seconds=60)
        whole.sendall(request_bytes(COMPLETE, json.dumps({**LONG, "max_tokens": 900, "stream": False}).encode()))
        half = open_socket(server.port, seconds=60)
        half.sendall(request_bytes("/tokenize", b'{"prompt": "x"}')[:-1])
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        if grace > 1:
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
        start_time = time.monotonic()
        assert server.end(0) == 0
        assert time.monotonic() - start_time < (2 if grace > 1 else 6)
        for connection in (whole, half):
            status, answer = read_answer(connection)
            assert (status, json.loads(answer)["error"]["code"]) == (503, "server_stopped")
            assert json.loads(answer)["error"]["message"].startswith("the server was stopped before the answer was ")
        rest = b""
        while part := stream.recv(65536):
            rest += part
        *_, last, end = rest.split(b"\n\n")
        assert end == b"\r\n0\r\n\r\n"  # a chunk's
        assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == "server_stopped"
        assert b"data: [DONE]" not in rest
    said = "".join(server.lines)
    assert len(re.findall(r"POST /v1/completions 503 \S+ s, the server was stopped before", said)) == 1
    assert re.search(r"POST /v1/completions 503 \S+ s, \d+ prompt tokens .* [1-9]\d* new tokens, not finished", said)
    assert re.search(r"POST /tokenize 503 \S+ s, the server was stopped before", said)


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    assert refused("--host", "0.0.0.0").startswith("others can reach 0.0.0.0: add --api-key")
    assert "has no address" in refused("--host", "no.such.host.invalid")
    assert refused("--api-key", "a", "--api-key-file", "b") == "--api-key and --api-key-file cannot be combined"
    assert "cannot be read" in refused("--api-key-file", tmp_path / "none")
    assert "holds no usable key" in refused("--api-key", "")
    assert "expected an origin" in refused("--cors-origin", "example.org")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--port", port)
    assert line.startswith(f"cannot listen at 127.0.0.1 port {port}: ")
    assert line.endswith(f"port {port}: Address already in use; choose another --port")
    line = refused("--host", "192.0.2.1", "--api-key", "a")  # of documentation: no machine has it
    assert line.endswith("Cannot assign requested address; choose another --host")
    assert refused("--chat-template", tmp_path / "none").startswith(f"{tmp_path / 'none'} cannot be read")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_key_of_the_environment_and_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = ("--host", "192.0.2.1")
    assert refused(*unreachable).startswith("others can reach 192.0.2.1: add --api-key-file or LLMCLI_API_KEY")
    monkeypatch.setenv("LLMCLI_API_KEY", "a b")
    assert refused().startswith("LLMCLI_API_KEY holds no usable key")
    monkeypatch.setenv("LLMCLI_API_KEY", "from-environment")
    assert refused(*unreachable).endswith("choose another --host")
    (tmp_path / "key").write_bytes(b"\xef\xbb\xbffrom-file\r\n")
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') if messages|length > 1 else messages[0].content }}")
    flags = (
        "--api-key-file",
        tmp_path / "key",
        "--chat-template",
        template,
        *(("--host", "::1") if has_ipv6() else ()),
    )
    one = {"role": "user", "content": "Hi"}
    with running_server(*flags) as server:  # the option wins
        assert not has_ipv6() or server.url.startswith("http://[::1]:")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="from-file", max_retries=0)
        client.chat.completions.create(model="storyteller", messages=[one], max_tokens=1)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="storyteller", messages=[one, one], max_tokens=1)
        assert caught.value.param == "messages"
        assert "the chat template failed: roles must alternate" in str(caught.value)
        assert str(tmp_path) not in str(caught.value)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="from-environment").models.list()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')\n")
    command = [sys.executable, "-m", "llmcli", "serve"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert re.fullmatch(r'error: serve needs the package uvicorn: run `\S.* install ".+\[serve\]"`\n', result.stderr)
    assert result.returncode == 2


def test_a_queue_that_is_full_says_so() -> None:
    with running_server("--rows", 1, "--max-queue", 0) as server:
        connection = start_long(server, max_tokens=900)
        status, answer = post(server.port, COMPLETE, STORY)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        connection.close()
        end = time.monotonic() + 20
        while post(server.port, COMPLETE, STORY)[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_fault_of_a_draft_model_is_said_once_and_costs_no_text(tmp_path: Path) -> None:
    model, drafter = write_tiny_llama(tmp_path / "model"), write_broken_llama(tmp_path / "drafter")
    with running_server("-m", model, "--draft", drafter, "--rows", 2) as server:
        for prompt in ("abc abc abc", "xyz"):
            _, answer = post(server.port, COMPLETE, {"prompt": prompt, "seed": 1, "max_tokens": 30, "n": 2})
            flags = ("-m", model, "--seed", 1, "--max-new-tokens", 30, "-n", 2, "--json")
            alone = json.loads(run_here("generate", prompt, "--device", "cpu", *flags).stdout)["samples"]
            assert [choice["text"] for choice in answer["choices"]] == [sample["text"] for sample in alone]
        said = "".join(server.lines)
    assert said.count("the run continues without drafts") == 1
    assert re.search(r"warning: --draft: .*NaN", said)
