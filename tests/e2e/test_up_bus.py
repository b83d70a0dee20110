"""The bus that `penstock up` starts: users for each role, passwords in private files alone, and everything works so."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from common.cli.demo import MARK, Site, leftovers, marked_processes
from common.models.source import ModelFiles
from common.protocol import subjects
from common.runtime import nats_client
from common.runtime.bus_login import run_folder
from common.runtime.nats_access import USERS
from tests.e2e.test_up import ROOT, SIMULATED, STOP_TIMEOUT_S, penstock_up, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CLI = [sys.executable, "-m", "common.cli"]
ALL_ROLES = ("--prefill=1", "--decode=2", "--draft=1", "--kvstore=1", "--nats-clients=alice")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up-bus")


@pytest.fixture(scope="module")
def site(folder: Path, smollm2: ModelFiles) -> Iterator[Site]:
    with penstock_up(folder, *ALL_ROLES, environment=SIMULATED) as (site, up):
        yield site
        up.send_signal(signal.SIGINT)
        assert up.wait(STOP_TIMEOUT_S) == 0, (folder / "up.log").read_text()
    assert leftovers(site) == []
    assert not run_folder(site.nats_port).exists(), "the credentials outlived the bus"
    logs = "".join(log.read_text(errors="replace") for log in (folder / "logs").glob("*.log"))
    assert "nats_denied" not in logs and "Permissions Violation" not in logs, logs[-5000:]


def passwords(site: Site) -> dict[str, str]:
    return {
        user: json.loads((run_folder(site.nats_port) / f"{user}.json").read_text())["password"] for user in (*USERS, "alice")
    }


def test_credentials_are_in_private_files_and_nowhere_else(site: Site, folder: Path) -> None:
    run_at = run_folder(site.nats_port)
    assert stat.S_IMODE(run_at.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in run_at.iterdir()} == {0o600}
    known = passwords(site)
    assert len(set(known.values())) == len(known)
    processes = marked_processes(f"{MARK}={site.mark}")
    assert sum("nats-server" in line for _, line in processes) >= 1 and len(processes) >= 8
    for pid, line in processes:
        seen = line + Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        assert not any(password in seen for password in known.values()), line
    written = "".join(file.read_text(errors="replace") for file in [folder / "up.log", *(folder / "logs").glob("*.log")])
    assert not any(password in written for password in known.values())


def test_every_command_finds_its_credentials_by_the_address(site: Site) -> None:
    target = ["--nats-url", site.nats_url]
    assert run([*CLI, "generate", "Hello", "--max-tokens", "4", *target]).strip()
    assert "ready" in run([*CLI, "status", *target])
    assert "0 failed" in run([*CLI, "bench", "--requests", "4", "--concurrency", "2", "--max-tokens", "4", *target])
    said = subprocess.run(
        [*CLI, "chat", *target], input="Hello\n", cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 0, said.stderr


def test_a_worker_joins_by_hand_as_the_readme_says(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.draft", "--nats-url", site.nats_url, "--worker-id", "draft-by-hand"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {MARK: site.mark})
    try:
        for _ in range(20):
            if "draft-by-hand" in run([*CLI, "status", "--json", "--nats-url", site.nats_url]):
                return
        raise AssertionError((tmp_path / "log").read_text())
    finally:
        worker.terminate()
        worker.wait(30)


def test_without_credentials_nothing_is_served(site: Site, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*CLI, "generate", "Hello", "--nats-url", site.nats_url],
        cwd=ROOT,
        env=os.environ | {"PENSTOCK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1 and "wants other credentials" in ended.stderr and "Traceback" not in ended.stderr


async def test_the_monitor_hears_of_every_service(site: Site) -> None:
    login = json.loads((run_folder(site.nats_port) / "monitor.json").read_text())
    client = await nats.connect(site.nats_url, **{key: login[key] for key in ("user", "password", "inbox_prefix")})
    names: set[str] = set()

    async def hear(message: Msg) -> None:
        names.add(json.loads(message.data)["name"])

    try:
        await client.subscribe(inbox := client.new_inbox(), cb=hear)
        await client.publish("$SRV.INFO", b"", reply=inbox)
        for _ in range(200):
            if len(names) == 5:
                break
            await client.flush()
        assert names == {f"penstock-{role}" for role in ("gateway", "prefill", "decode", "draft", "kvstore")}
    finally:
        await client.close()


async def test_a_client_neither_hears_nor_cancels_what_another_one_asks(site: Site) -> None:
    """On the bus as it is started, with every message of it: requests, answers and what is said inside."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    async def connected(user: str) -> Client:
        login = json.loads((run_folder(site.nats_port) / f"{user}.json").read_text())
        return await nats.connect(
            site.nats_url, error_cb=ignore, **{key: login[key] for key in ("user", "password", "inbox_prefix")}
        )

    async def ignore(_: Exception) -> None:
        return None

    alice, client = await connected("alice"), await connected("client")
    try:
        for subject in (
            ">",
            "_INBOX.>",
            "_INBOX.client.>",
            "penstock.v1.chat.*",
            "penstock.v1.cancel.*",
            "penstock.v1.int.inbox.>",
        ):
            await alice.subscribe(subject, cb=hear)
        await nats_client.flush(alice, 5)
        subject = subjects.chat("smollm2-135m-instruct")
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "ignore_eos": True}).encode()
        replies = await client.subscribe(inbox := client.new_inbox())
        await client.publish(subject, body, reply=inbox, headers={"Penstock-Request-Id": "mine"})
        for _ in range(20):
            await alice.publish(subjects.cancel("mine"), b"", reply="_INBOX.client.guess")
            await alice.publish(subjects.cancel("mine"), b"")
        await nats_client.flush(alice, 5)
        while "Penstock-Final" not in ((reply := await replies.next_msg(30)).headers or {}):
            pass
        assert "Nats-Service-Error-Code" not in (reply.headers or {})
        assert json.loads(reply.data)["usage"]["completion_tokens"] == 300
        await nats_client.flush(alice, 5)
        assert heard == []
    finally:
        await alice.close()
        await client.close()


def test_what_is_for_the_bus_of_others_is_refused_without_one(smollm2: ModelFiles) -> None:
    command = [*CLI, "up", "--nats-creds", "x.creds"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "nats_creds is for a bus that runs already" in ended.stderr
    ended = subprocess.run(
        [*CLI, "up", "--nats-clients", "gateway"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1 and "there is a user gateway already" in ended.stderr
