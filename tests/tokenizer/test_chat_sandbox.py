"""Chat templates as attacks: every one is refused or bounded, with one line, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmcli.errors import TokenizerError
from llmcli.tokenizer import chat_encoding
from llmcli.tokenizer.chat_encoding import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
# Values that jinja2 cannot compute while it compiles.
ONE = "(messages | length)"

TOO_LONG = "T failed: it does not end within 1 s; choose another one with --chat-template FILE"
TOO_MUCH_MEMORY = "T failed: it needs more than 256 MB of memory"
TOO_MUCH_OUTPUT = "T failed: it writes more than 4 MB"

assert chat_encoding.TIME_LIMIT_SECONDS == 2

needs_memory_limit = pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to its limit")


@pytest.fixture
def _short_limit(monkeypatch):
    monkeypatch.setattr(chat_encoding, "TIME_LIMIT_SECONDS", 1)


@pytest.fixture
def workers():
    """The child processes that a test started and that still run; zombies count."""
    before = set(psutil.Process().children())
    return lambda: list(set(psutil.Process().children()) - before)


@pytest.fixture
def failure_of(workers):
    return lambda source: one_line_failure(source, workers)


def one_line_failure(source, workers):
    """The message of the error, which comes within the time limit; no process is left."""
    template = ChatTemplate(source, "T", {})
    started = time.monotonic()
    try:
        with pytest.raises(TokenizerError) as caught:
            template.render(HELLO)
        assert time.monotonic() - started < 8  # 1 s, and the start of a process on a busy machine
    finally:
        template.close()
    assert workers() == []
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.usefixtures("_short_limit")
@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ 10 ** (10 ** 10) }}",
        "{{ lipsum(n=10 ** 8) }}",
    ],
)
def test_endless_templates_are_stopped(source, failure_of):
    assert failure_of(source) == TOO_LONG


@needs_memory_limit
@pytest.mark.parametrize(
    "source",
    [
        '{{ "x" * 10 ** 9 }}',
        "{{ 'x' * " + ONE + " * 10 ** 9 }}",
        "{{ [1] * " + ONE + " * 10 ** 9 }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(9) %}{% set ns.s = ns.s.replace('x', 'x' * 99) %}"
        "{% endfor %}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
    ],
)
def test_huge_values_are_refused(source, failure_of):
    assert failure_of(source).startswith(TOO_MUCH_MEMORY)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 100 + "{% endfor %}{% endfor %}",
        "{{ 'x' * 5 * 2 ** 20 }}",
        "{{ 'é' * 3 * 2 ** 20 }}",
        "{% macro m() %}{{ 'x' * 3 * 2 ** 20 }}{% endmacro %}{{ m() }}{{ m() }}",
    ],
)
def test_long_output_is_refused(source, failure_of):
    assert failure_of(source) == TOO_MUCH_OUTPUT


def test_output_up_to_the_bound_arrives():
    template = ChatTemplate("{{ '\\x01' * 4 * 2 ** 20 }}", "T", {})
    assert template.render(HELLO) == "\x01" * 4 * 2**20
    with pytest.raises(TokenizerError, match="writes more than 4 MB"):
        ChatTemplate("{{ 'x' * (4 * 2 ** 20 + 1) }}", "T", {}).render(HELLO)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% import '/etc/passwd' as x %}", "no loader for this environment"),
        ("{% extends '/etc/passwd' %}", "no loader for this environment"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ ''['__class__'].x }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ ''['_' ~ '_class__'].x }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ (messages | attr('__class__')).x }}", "unsafe"),
        ("{{ (messages | map(attribute='__class__') | first).x }}", "unsafe"),
        ("{{ lipsum.__globals__['os'].popen('id').read() }}", "access to attribute '__globals__'"),
        ("{{ cycler.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ self.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ dict.__call__.__globals__ }}", "access to attribute '__call__'"),
        ("{{ raise_exception.__globals__.x }}", "access to attribute '__globals__'"),
        ("{% macro m() %}{% endmacro %}{{ m.__init__.x }}", "access to attribute '__init__'"),
        ("{{ namespace.__init__.x }}", "access to attribute '__init__'"),
        ("{{ namespace(__class__=1) }}", "a namespace cannot hold '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "a namespace cannot hold '__class__'"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{ '{a.__class__.b}'.format_map({'a': 1}) }}", "unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ range(10 ** 9) | length }}", "OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "not " * 9999 + "1 }}", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_ways_out_are_refused(source, reason, failure_of):
    message = failure_of(source)
    assert message.startswith("T failed: ")
    assert reason in message


@pytest.mark.parametrize(
    "source",
    [
        "{{ '' | attr('__class__') }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('{0.__class__}' | attr('format'))(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ strftime_now.__code__ }}",
        "{{ namespace.__init__ }}",
    ],
)
def test_what_is_unsafe_and_unused_is_empty(source, failure_of):
    assert ChatTemplate(source, "T", {}).render(HELLO) == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% if %}", "T failed: Expected an expression, got 'end of statement block' (line 2)"),
        ("{% nonsense %}", "T failed: Encountered unknown tag 'nonsense'. (line 1)"),
        ("a\nb\n{{ foo.bar }}", "T failed: 'foo' is undefined (line 3)"),
        ("{{ 1 + 'a' }}", "T failed: TypeError: unsupported operand type(s) for +: 'int' and 'str' (line 1)"),
        ("{{ raise_exception('Roles must\\nalternate.\\x1b[2J') }}", "T failed: Roles must alternate. [2J (line 1)"),
        ("{{ raise_exception('x' * 10 ** 6) }}", f"T failed: {'x' * 400} (line 1)"),
        ("{{ raise_exception(5) }}", "T failed: 5 (line 1)"),
    ],
)
def test_failures_are_one_line(source, message, failure_of):
    assert failure_of(source) == message


def test_a_template_goes_on_after_a_failure(workers):
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}fine", "T", {})
    assert template.render(HELLO) == "fine"
    with pytest.raises(TokenizerError, match="does not end"):
        template.render([{"role": "user", "content": "loop"}])
    assert workers() == []
    assert template.render(HELLO) == "fine"
    with pytest.raises(TokenizerError, match="is undefined"):
        ChatTemplate("{{ a.b }}", "T", {}).render(HELLO)
    template.close()
    template.close()
    assert template.render(HELLO) == "fine"


def test_one_process_serves_a_template_and_is_not_of_the_terminal(workers):
    template = ChatTemplate("{{ messages[0].content }}", "T", {})
    assert workers() == []
    template.render(HELLO)
    (worker,) = workers()
    assert template.render([{"role": "user", "content": "\x00é\n世\u2028"}]) == "\x00é\n世\u2028"
    assert workers() == [worker]
    assert sys.platform == "win32" or os.getsid(worker.pid) != os.getsid(0)
    worker.kill()
    worker.wait()
    assert template.render(HELLO) == "hello"
    del template
    assert workers() == []


def test_rendering_is_quick_once_the_process_runs():
    template = ChatTemplate("{{ messages[0].content }}", "T", {})
    template.render(HELLO)
    durations = []
    for _ in range(5):
        started = time.perf_counter()
        template.render(HELLO)
        durations.append(time.perf_counter() - started)
    assert min(durations) < 0.1


def test_nothing_is_imported_or_started_before_a_rendering():
    program = (
        "import sys; import llmcli.tokenizer.chat_encoding as encoding, llmcli.tokenizer.chat_encoding as templates\n"
        "templates.ChatTemplate('', 'T', {})\n"
        "import psutil; print({'jinja2', 'tokenizers', 'sentencepiece'} & set(sys.modules), "
        "psutil.Process().children())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "set() []\n"


RENDER_ENDLESSLY = f"""
from llmcli.tokenizer import chat_encoding
from llmcli.tokenizer.chat_encoding import ChatTemplate
chat_encoding.TIME_LIMIT_SECONDS = 1
template = ChatTemplate({ENDLESS + "{{ messages }}"!r}, "T", {{}})
idle = ChatTemplate("ready", "T", {{}})
idle.render([])
print("ready", flush=True)
template.render([])
"""


@pytest.fixture
def busy_program():
    """A program in the middle of an endless rendering, and its workers, one of them idle."""
    program = subprocess.Popen(
        [sys.executable, "-c", RENDER_ENDLESSLY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert program.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 10
    workers = []
    while not any(worker.cpu_times().user > 0.2 for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        workers = psutil.Process(program.pid).children()
    yield program, workers
    program.kill()
    program.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_worker_outlives_an_interrupted_program(busy_program, name):
    program, workers = busy_program
    program.send_signal(getattr(signal, name))
    _, errors = program.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors or name != "SIGINT"
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
