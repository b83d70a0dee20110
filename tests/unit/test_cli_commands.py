"""Commands as programs: exit status, what goes to stdout and what to stderr, and every way in which a server can fail them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.cli import status
from common.cli.app import app
from common.cli.bench import server_of
from common.cli.console import MessageConsole
from common.cli.net import free_port, may_use_proxy
from common.protocol.errors import ConfigError
from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import KvUsage, Presence


def penstock(*words: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    ended = subprocess.run(
        [sys.executable, "-m", "common.cli", *words],
        input=stdin,
        env=clean | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    found = subprocess.CompletedProcess(words, ended.returncode, ended.stdout.decode(), ended.stderr.decode())
    assert "Traceback" not in found.stderr, found.stderr
    return found


@pytest.mark.parametrize(
    ("word", "service"),
    [
        ("gateway", "gateway"),
        ("draft", "draft"),
        ("draft-worker", "draft"),
        ("decode", "decode"),
        ("prefil", "prefill"),
        ("kv-store", "kvstore"),
        ("stat", ""),
        ("xyz", ""),
    ],
)
def test_a_command_that_names_a_service_says_how_one_is_started(word: str, service: str) -> None:
    ended = CliRunner().invoke(app, [word])
    assert ended.exit_code == 2 and f"No such command '{word}'." in ended.output
    said = " ".join(ended.output.split())
    assert (f"`python -m services.{service}`" in said and f"`penstock up --{service} 1`" in said) == bool(service)
    assert ("Did you mean 'status'" in said) == (word == "stat")


# ── bench over HTTP, against a server that misbehaves ────────────────────────────────────────────────────────────────────

Answer = Callable[[BaseHTTPRequestHandler], None]


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TEXT = chunk(choices=[{"index": 0, "delta": {"content": "Hello"}}])
USAGE = chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})


def stream(*pieces: bytes) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.end_headers()
        for piece in pieces:
            request.wfile.write(piece)

    return answer


def refuse(code: int, body: bytes) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


GOOD = stream(TEXT, USAGE, b"data: [DONE]\n\n")


@contextmanager
def server(chat: Answer, models: bytes = b'{"data": [{"id": "m"}]}', key: str = "") -> Iterator[str]:
    """A server on 127.0.0.1; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/v1/models" and (not key or self.headers.get("authorization") == f"Bearer {key}")
            refuse(200 if known else 401 if key else 404, models if known else b"{}")(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            (chat if self.path == "/v1/chat/completions" else refuse(404, b"{}"))(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_bench_takes_a_url_with_and_without_the_apis_path(suffix: str) -> None:
    with server(GOOD) as url:
        ended = penstock("bench", "--url", url + suffix, "--requests", "3")
    assert ended.returncode == 0, ended.stderr
    assert "3 requests" in ended.stdout and "0 failed" in ended.stdout


def test_bench_goes_to_this_machine_past_the_environments_proxy() -> None:
    with server(GOOD) as url:
        ended = penstock("bench", "--url", url, "--requests", "1", HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="")
    assert ended.returncode == 0, ended.stderr


OVERLOADED = b'{"error": {"code": "overloaded", "message": "try again"}}'


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (refuse(429, OVERLOADED), "overloaded: try again"),
        (refuse(500, b"<html>oops</html>"), "oops"),
        (stream(TEXT), "ended in the middle of an answer"),
        (stream(b"data: {not json\n\n"), "no OpenAI chunk"),
        (stream(TEXT, chunk(error={"code": "no_workers", "message": "nobody is there"})), "no_workers: nobody is there"),
        (stream(b"data: [DONE]\n\n"), "ended without a token"),
    ],
)
def test_bench_fails_when_requests_fail_and_says_each_reason_once(chat: Answer, says: str) -> None:
    with server(chat) as url:
        ended = penstock("bench", "--url", url, "--requests", "5", "--concurrency", "1")
    assert ended.returncode == 1
    assert "5 failed" in ended.stdout and "5 of 5 requests failed" in ended.stderr
    assert ended.stderr.count(says) == 2, "when it happens, and how often at the end"
    assert "0.0 ms" not in ended.stdout, "nothing was measured"


@pytest.mark.parametrize(
    ("models", "says"), [(b"<html>", "gave no list of models"), (b"{}", "gave no list"), (b'{"data": []}', "gave no list")]
)
def test_bench_against_something_else_says_so(models: bytes, says: str) -> None:
    with server(GOOD, models) as url:
        ended = penstock("bench", "--url", url, "--requests", "1")
    assert ended.returncode == 1 and says in ended.stderr


def test_bench_gives_its_key() -> None:
    with server(GOOD, key="s3cret") as url:
        ended = penstock("bench", "--url", url, "--requests", "1")
        assert ended.returncode == 1 and "PENSTOCK_API_KEY" in ended.stderr
        ended = penstock("bench", "--url", url, "--requests", "1", "--model", "m", "--api-key", "wrong")
        assert ended.returncode == 1 and "PENSTOCK_API_KEY" in ended.stderr and not ended.stdout
        assert penstock("bench", "--url", url, "--requests", "1", "--api-key", "s3cret").returncode == 0
        assert penstock("bench", "--url", url, "--requests", "1", PENSTOCK_API_KEY="s3cret").returncode == 0


def test_bench_of_a_model_that_is_not_served_is_one_line() -> None:
    with server(GOOD) as url:
        ended = penstock("bench", "--url", url, "--requests", "1", "--model", "nope")
    assert ended.returncode == 1 and not ended.stdout
    assert (
        ended.stderr.startswith("error model_not_found: the model 'nope' is not served on ") and ended.stderr.count("\n") == 1
    )
    with server(GOOD, b"<html>") as url:
        assert penstock("bench", "--url", url, "--requests", "1", "--model", "m").returncode == 0


def test_bench_without_a_server_fails() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    ended = penstock("bench", "--url", nobody)
    assert ended.returncode == 1 and "nothing answers on" in ended.stderr
    ended = penstock("bench", "--url", nobody, "--model", "m", "--requests", "2")
    assert ended.returncode == 1 and "nothing answers on" in ended.stderr and not ended.stdout
    for wrong in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1", "http://h:99999"):
        with pytest.raises(ConfigError, match="give http://host:port"):
            server_of(wrong)


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

NOBODY = ("--nats-url", "nats://127.0.0.1:9")


def test_generate_reads_what_is_piped_in_unless_an_argument_asks() -> None:
    """All at once: whoever has something to ask looks for a server for some seconds."""
    cases = [
        ((), b"Why?\n", "no NATS server"),
        ((), b"", "nothing to ask"),
        ((), b"\xff\xfe", "not UTF-8"),
        (("-",), b"Why?\n", "no NATS server"),
        (("-",), b"", "nothing to ask"),
        (("-",), b"\xff\xfe", "not UTF-8"),
        (("Why?",), b"\xff", "no NATS server"),
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        ended = list(threads.map(lambda case: penstock("generate", *case[0], *NOBODY, stdin=case[1]), cases))
    for (words, stdin, message), found in zip(cases, ended, strict=True):
        assert message in found.stderr, (words, stdin)


@pytest.mark.parametrize("url", ["nats://[::1", "nats://somebody:pa55word@127.0.0.1:99999"])
def test_a_url_that_is_none_is_one_line_without_its_password(url: str) -> None:
    ended = penstock("generate", "Why?", "--model", "m", "--nats-url", url)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "is not a NATS URL" in ended.stderr and "pa55word" not in ended.stderr


def test_an_argument_that_is_no_text_and_a_port_that_is_none_are_refused() -> None:
    assert "not valid UTF-8" in penstock("generate", "\udcff", *NOBODY).stderr
    ended = penstock("doctor", "--http-port", "99999")
    assert ended.returncode == 2 and "--http-port" in ended.stderr


# ── variables, passwords ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", ["status", "generate hello", "chat", "bench", "pull", "up"])
def test_an_unknown_variable_stops_every_command(command: str) -> None:
    ended = penstock(*command.split(), PENSTOCK_NATS_ULR="nats://10.0.0.1:4222")
    assert ended.returncode == 1
    assert "unknown variable PENSTOCK_NATS_ULR; did you mean PENSTOCK_NATS_URL?" in ended.stderr


def test_help_is_given_whatever_is_exported() -> None:
    assert penstock("up", "--help", PENSTOCK_NATS_ULR="x").returncode == 0
    assert penstock("--help", PENSTOCK_NATS_ULR="x").returncode == 0


def test_a_bus_that_does_not_answer_is_named_without_its_password() -> None:
    ended = penstock("status", PENSTOCK_NATS_URL="nats://user:pa55word@127.0.0.1:9")
    assert ended.returncode == 1
    assert "127.0.0.1:9" in ended.stderr and "pa55word" not in ended.stderr


# ── status ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def worker(role: Role, name: str = "7371b4ea", model: str = "m", **fields: object) -> Presence:
    said: dict[str, object] = {"state": "ready", "model": model, **fields}
    return Presence(worker=WorkerRef(role, f"{role}-{name}", 1), **said)  # pyright: ignore[reportArgumentType]


WORKERS = [
    worker("gateway", running=8192, waiting=1024),
    worker("prefill", state="starting", loaded=0.4),
    worker("decode", state="draining", running=256, credits=29_120, step_ms=12_345.6, tokens_per_s=123_456.0),
    worker("kvstore", kv=KvUsage(29_120, 1000, 20_000, 20, 8100), credits=1_000_000),
    worker("decode", "with-a-very-long-name-of-its-own-that-somebody-chose-for-it"),
]


@pytest.mark.parametrize("width", [80, 132])
def test_status_fits_the_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), soft_wrap=True)
    console.print(status.table(WORKERS, width))
    written = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert max(map(len, written.splitlines())) <= width
    for cell in ("gateway-7371b4ea", "load 40%", "draining", "69%", "28%", "12346ms", "123k", "29k", "1M"):
        assert cell in written
    assert written.count("…") == (1 if width == 80 else 0)


def test_status_groups_workers_of_several_models() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(status.table([*WORKERS, worker("gateway", "other", model="Another Model")]))
    written = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert written.index("kvstore-7371b4ea") < written.index("Another Model") < written.index("gateway-other")


def test_a_reader_of_stderr_that_has_ended_ends_no_command() -> None:
    """`penstock up 2>&1 | …`: it would stop all services as it reports that one of them crashed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = MessageConsole(file=file)
        console.print("a worker crashed")
        console.print("and again")


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:9")
    assert not may_use_proxy("http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match=r"a proxy of the environment .* can't be used: .*gopher"):
        may_use_proxy("http://example.org")
