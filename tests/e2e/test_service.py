"""What `main` gives every service, tried on a real process with a real nats-server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fixtures.nats import LocalNatsServer

SERVICE = """
import time
import anyio, anyio.to_thread
from common.protocol.errors import UnknownModel
from common.runtime import service
from common.runtime.actor import Actor
from common.runtime.service import main
from common.runtime.settings import ServiceConfig


class Config(ServiceConfig, frozen=True, kw_only=True):
    hold_s: float = 0.0
    fail: str = ""
    path: str = ""


class Probe(Actor):
    role = "draft"

    async def start(self):
        if self.config.fail == "load":
            raise UnknownModel("no model named x; run `penstock pull x`")
        if self.config.fail == "mistake":
            raise ValueError("a mistake of ours")
        if self.config.fail == "slow load":
            service.FORCED_EXIT_S = 0.5
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(time.sleep, 60)

    async def drain(self):
        await anyio.sleep(self.config.hold_s)

    def close(self):
        if self.config.path:
            open(self.config.path, "w").close()


main(Config, lambda bus, config: Probe(bus=bus, config=config), section="draft")
"""


class Process:
    def __init__(self, directory: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.log = directory / "service.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVICE, "--http-port=0", "--worker-id=probe-1", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )

    def port(self) -> int:
        line = self.wait_for("serving_http")
        return int(line.split("port=")[1].split()[0])

    def wait_for(self, event: str, timeout_s: float = 15.0) -> str:
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at:
            for line in self.log.read_text().splitlines():
                if event in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no {event} in:\n{self.log.read_text()}")

    def ended(self, timeout_s: float = 15.0) -> tuple[int, str, bytes]:
        """Exit status, stderr, stdout."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, self.log.read_text(), out


@pytest.fixture
def start(tmp_path: Path, nats_server: str) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start_one(*arguments: str, nats_url: str = nats_server, environment: dict[str, str] | None = None) -> Process:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        process = Process(directory, f"--nats-url={nats_url}", *arguments, environment=environment)
        started.append(process)
        return process

    yield start_one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.process.kill()
        process.process.communicate()


def test_a_service_serves_health_readiness_and_metrics_and_drains_on_sigterm(start: Callable[..., Process]):
    service = start("--hold-s=0.3")
    url = f"http://127.0.0.1:{service.port()}"
    service.wait_for("ready")
    assert httpx.get(f"{url}/ready").json() == {
        "status": "ok",
        "state": "ready",
        "worker": "probe-1",
        "bus_connected": True,
    }
    assert httpx.get(f"{url}/health").status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    assert "penstock_handler_errors_total 0.0" in metrics and "process_resident_memory_bytes" in metrics
    service.process.terminate()
    time.sleep(0.1)
    assert httpx.get(f"{url}/ready").status_code == 503
    status, log, out = service.ended()
    assert status == 0 and out == b"" and "drained" in log and "Traceback" not in log


def test_a_name_that_an_attacker_made_to_resolve_to_loopback_is_refused(start: Callable[..., Process]):
    service = start("--allowed-hosts=api.example", "--allowed-origins=https://chat.example")
    url = f"http://127.0.0.1:{service.port()}/health"
    service.wait_for("ready")
    for sent in ({"host": "attacker.example"}, {"host": f"attacker.example:{service.port()}"}):
        refused = httpx.get(url, headers=sent)
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "host_not_allowed")
    refused = httpx.get(url, headers={"origin": "https://attacker.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    for sent in ({"host": "localhost"}, {"host": "api.example"}, {"origin": "https://chat.example"}):
        assert httpx.get(url, headers=sent).status_code == 200
    metrics = httpx.get(url.replace("health", "metrics")).text
    assert 'penstock_http_refused_total{code="host_not_allowed"} 2.0' in metrics


def test_health_turns_bad_while_the_server_is_away_and_good_again(
    start: Callable[..., Process], nats_server_factory: Callable[[], LocalNatsServer]
):
    server = nats_server_factory()
    service = start(nats_url=server.url)
    url = f"http://127.0.0.1:{service.port()}/health"
    service.wait_for("ready")
    server.stop()
    service.wait_for("nats_disconnected")
    assert httpx.get(url).status_code == 503
    server.start()
    service.wait_for("nats_reconnected")
    assert httpx.get(url).status_code == 200


def test_a_service_waits_for_a_server_that_is_not_there_yet_and_can_be_stopped_meanwhile(start: Callable[..., Process]):
    service = start(nats_url="nats://127.0.0.1:1")
    service.wait_for("waiting_for_nats")
    service.process.terminate()
    assert service.ended()[0] == 0


def test_a_second_signal_ends_a_drain_at_once(start: Callable[..., Process], tmp_path: Path):
    service = start("--hold-s=60", f"--path={tmp_path / 'closed'}")
    service.wait_for("ready")
    service.process.terminate()
    service.wait_for("draining")
    began = time.monotonic()
    service.process.terminate()
    assert service.ended()[0] == 128 + signal.SIGTERM
    assert time.monotonic() - began < 3 and (tmp_path / "closed").exists()


def test_a_drain_that_takes_too_long_is_cut_off(start: Callable[..., Process]):
    service = start("--hold-s=60", "--drain-timeout-s=0.2")
    service.wait_for("ready")
    service.process.terminate()
    status, log, _ = service.ended()
    assert status == 0 and "drain_timed_out" in log


def test_a_service_that_loads_for_long_is_not_waited_for(start: Callable[..., Process]):
    service = start("--fail=slow load")
    service.wait_for("serving_http")
    began = time.monotonic()
    service.process.terminate()
    assert service.ended()[0] == -signal.SIGALRM
    assert time.monotonic() - began < 15, "a drain may take longer"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--hold=1"], "penstock draft: unknown flag --hold; did you mean --hold-s?"),
        (["--fail=load"], "penstock draft: no model named x; run `penstock pull x`"),
        (["--nats-url=nats://127.0.0.1:x"], "is not a NATS URL"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(start: Callable[..., Process], arguments: list[str], line: str):
    status, log, out = start(*arguments).ended()
    assert status == 2 and line in log.splitlines()[-1] and "Traceback" not in log and out == b""


def test_an_unknown_variable_is_one_line_that_names_the_nearest(start: Callable[..., Process]):
    status, log, _ = start(environment={"PENSTOCK_NATS_ULR": "nats://10.0.0.1:4222"}).ended()
    assert status == 2
    assert "unknown variable PENSTOCK_NATS_ULR; did you mean PENSTOCK_NATS_URL?" in log.splitlines()[-1]


def test_a_port_in_use_is_one_line_that_says_what_to_do(start: Callable[..., Process]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, log, _ = start(f"--http-port={taken.getsockname()[1]}").ended()
    assert status == 2 and "address already in use; choose another with --http-port" in log.splitlines()[-1]


def test_a_mistake_of_ours_is_a_traceback_in_the_log_and_status_1(start: Callable[..., Process], tmp_path: Path):
    status, log, _ = start("--fail=mistake", f"--path={tmp_path / 'closed'}", "--log-format=json").ended()
    assert status == 1 and (tmp_path / "closed").exists()
    last = json.loads(log.splitlines()[-1])
    assert last["event"] == "service_failed" and "a mistake of ours" in last["exception"]


def test_a_service_cleans_up_and_ends_when_its_supervisor_is_killed(tmp_path: Path, nats_server: str):
    supervisor = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], *sys.argv[2:]],"
        " env={**os.environ, 'PENSTOCK_PARENT_PID': str(os.getpid())})\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    log_path, closed = tmp_path / "log", tmp_path / "closed"
    with log_path.open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", supervisor, SERVICE, f"--nats-url={nats_server}", "--hold-s=60", f"--path={closed}"],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while b" ready " not in log_path.read_bytes():
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ends_at = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < ends_at and "State:\tZ" not in status_of(child):
        time.sleep(0.02)
    assert closed.exists() and time.monotonic() < ends_at


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


WATCHED = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""
"""Runs a service until it imports torch, which reads the policy then and never again."""


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
@pytest.mark.parametrize("role", ["prefill", "decode", "draft"])
def test_a_worker_that_waits_leaves_cores_to_others_unless_told_otherwise(
    role: str, policy: str | None, nats_server: str
) -> None:
    model = "dummy:llama-3.2-1b"
    flags = [f"--nats-url={nats_server}", f"--model={model}", "--http-port=0"]
    flags += [f"--draft-model={model}"] if role == "draft" else []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    command = [sys.executable, "-c", WATCHED, f"services.{role}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == (policy or "PASSIVE"), done.stderr
