"""`penstock up` as a user meets it: it serves, the examples work against it, and nothing is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from common.cli.demo import MARK, Site, leftovers, marked_processes
from common.cli.net import free_ports
from common.models.source import ModelFiles

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 45.0
SIMULATED = {"PENSTOCK_ENGINE": "simulated", "PENSTOCK_TIME_SCALE": "0"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@contextmanager
def penstock_up(
    folder: Path, *flags: str, cwd: Path = ROOT, own_bus: bool = True, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Site, subprocess.Popen[bytes]]]:
    """A whole Penstock on ports of its own, ready; ended with the block if it still runs. It starts its own bus, or `flags` and
    `environment` say which one it joins."""
    shm_dir = folder / "shm"
    shm_dir.mkdir(exist_ok=True)
    http_port, nats_port = free_ports(2)
    site = Site(http_port, nats_port, shm_dir, f"test-{os.getpid()}-{time.time_ns()}")
    command = [sys.executable, "-m", "common.cli", "up", "--http-port", str(site.http_port)]
    command += ["--nats-port", str(site.nats_port), "--data-dir", str(folder / "data")] if own_bus else []
    command += ["--shm-dir", str(shm_dir), "--log-dir", str(folder / "logs"), "--kv-cache-mb", "256", *flags]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {MARK: site.mark, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_ready(site, up, folder / "up.log")
        yield site, up
    finally:
        if up.poll() is None:
            up.terminate()
            up.wait(STOP_TIMEOUT_S)


def wait_ready(site: Site, up: subprocess.Popen[bytes], log: Path) -> None:
    """Until the gateway is ready, and `up` has seen that, too: it says so last."""
    ended = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(base_url=f"http://127.0.0.1:{site.http_port}", timeout=5) as http:
        while up.poll() is None and time.monotonic() < ended:
            try:
                if http.get("/ready").status_code == 200 and "\nready\n" in log.read_text():
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    raise AssertionError(f"not ready:\n{log.read_text()}")


def run(command: list[str], **environment: str) -> str:
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_demo_streams_an_answer_and_leaves_nothing(smollm2: ModelFiles) -> None:
    said = run([sys.executable, "-m", "common.cli", "demo", "What is the capital of France?", "--max-tokens", "24"])
    assert "Paris" in said
    assert "TTFT" in said and "tok/s" in said


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelFiles) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("up")
    with penstock_up(folder, "--prefill", "1", "--draft", "1", "--kvstore", "1") as (site, up):
        yield site
        up.send_signal(signal.SIGINT)
        assert up.wait(STOP_TIMEOUT_S) == 0, (folder / "up.log").read_text()
    assert leftovers(site) == []


def test_generate_streams_over_nats(site: Site) -> None:
    command = [sys.executable, "-m", "common.cli", "generate", "What is the capital of France?", "--max-tokens", "24"]
    assert "Paris" in run([*command, "--nats-url", site.nats_url])


def test_status_tells_of_every_worker(site: Site) -> None:
    status = [sys.executable, "-m", "common.cli", "status", "--json", "--nats-url", site.nats_url]
    listed = json.loads(run(status))
    ended = time.monotonic() + START_TIMEOUT_S
    while {worker["state"] for worker in listed} != {"ready"}:  # the gateway does not wait for a prefill worker
        assert time.monotonic() < ended, listed
        listed = json.loads(run(status))
    assert [worker["worker"]["role"] for worker in listed] == ["gateway", "prefill", "decode", "draft", "kvstore"]
    decode = next(worker for worker in listed if worker["worker"]["role"] == "decode")
    assert decode["kv"]["total"] == sum(decode["kv"][state] for state in ("free", "owned", "leased", "cached"))


@pytest.mark.parametrize("way", ["nats", "http"])
def test_bench_counts_every_token(site: Site, way: str) -> None:
    command = [sys.executable, "-m", "common.cli", "bench", "--requests", "4", "--concurrency", "2", "--max-tokens", "8"]
    target = ["--url", f"http://127.0.0.1:{site.http_port}"] if way == "http" else ["--nats-url", site.nats_url]
    said = run([*command, "--prompt-words", "20", *target])
    assert "4 requests" in said and "0 failed" in said


def test_the_openai_example_works(site: Site) -> None:
    said = run([sys.executable, "examples/openai_client.py", "Hello"], PENSTOCK_URL=f"http://127.0.0.1:{site.http_port}")
    assert "generated" in said


def test_the_curl_example_works(site: Site) -> None:
    said = run(["bash", "examples/curl.sh"], PENSTOCK_URL=f"http://127.0.0.1:{site.http_port}")
    assert "chat.completion" in said and "[DONE]" in said


def test_the_raw_nats_example_works(site: Site) -> None:
    program = (ROOT / "examples" / "raw_nats.py").read_text().replace("nats://127.0.0.1:4222", site.nats_url)
    said = run([sys.executable, "-c", program, "Say hello."])
    assert '"usage"' in said


def test_everything_ends_with_a_killed_supervisor(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, environment=SIMULATED) as (site, up):
        up.kill()
        up.wait()
        ended = time.monotonic() + 15
        while leftovers(site) and time.monotonic() < ended:
            time.sleep(0.1)
        assert leftovers(site) == []


def test_closing_the_terminal_drains_and_stops(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, environment=SIMULATED) as (site, up):
        up.send_signal(signal.SIGHUP)
        assert up.wait(STOP_TIMEOUT_S) == 0
        assert leftovers(site) == []
    assert "draining" in (tmp_path / "up.log").read_text()


def test_a_killed_worker_comes_back_under_the_id_it_had(tmp_path: Path, smollm2: ModelFiles) -> None:
    """A gateway's quarantine is kept by worker id: a worker that dies again and again must not look like a new one."""
    with penstock_up(tmp_path, environment=SIMULATED) as (site, _):
        status = [sys.executable, "-m", "common.cli", "status", "--json", "--nats-url", site.nats_url]

        def decode() -> dict[str, object]:
            """The decode worker; empty while it is gone."""
            workers = [worker for worker in json.loads(run(status)) if worker["worker"]["role"] == "decode"]
            return workers[0]["worker"] | {"state": workers[0]["state"]} if workers else {}

        lives = [decode()]
        for _ in range(2):
            [pid] = [pid for pid, line in marked_processes(f"{MARK}={site.mark}") if "services.decode" in line]
            os.kill(pid, signal.SIGKILL)
            ended = time.monotonic() + 30
            while not (now := decode()) or now["epoch"] == lives[-1]["epoch"] or now["state"] != "ready":
                assert time.monotonic() < ended, now
            lives.append(now)
        assert len({str(life["id"]) for life in lives}) == 1
        assert str(lives[0]["id"]).startswith("decode-0-")
        assert len({life["epoch"] for life in lives}) == 3
    said = (tmp_path / "up.log").read_text()
    assert said.index("starting it again at once") < said.index("starting it again in 0.5 s")


@pytest.mark.parametrize("hanging", [("services.decode",), ("services.gateway", "services.kvstore", "nats-server")])
def test_up_ends_within_its_drain_time_though_children_hang(
    hanging: tuple[str, ...], tmp_path: Path, smollm2: ModelFiles
) -> None:
    drain_s = 6.0
    with penstock_up(tmp_path, f"--drain-timeout-s={drain_s}", environment=SIMULATED) as (site, up):
        stopped = [pid for pid, line in marked_processes(f"{MARK}={site.mark}") if any(name in line for name in hanging)]
        assert len(stopped) == len(hanging)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        up.terminate()
        up.wait(STOP_TIMEOUT_S)
        assert time.monotonic() - began < drain_s + 1
        assert leftovers(site) == []
    assert (tmp_path / "up.log").read_text().count("did not end in time: killing it") >= len(hanging)


def test_several_gateways_share_a_port(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, "--gateway", "3", "--draft", "0", "--kvstore", "0", "--prefill", "0") as (site, _):
        url = f"http://127.0.0.1:{site.http_port}"
        body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 2}
        for _ in range(4):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        asked = (httpx.get(f"{url}/health").json()["worker"] for _ in range(100))
        assert len(set(asked)) == 3
