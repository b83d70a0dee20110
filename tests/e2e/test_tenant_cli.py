"""The commands on a bus of somebody else's, as a tenant who may do what the README says and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.models.source import ModelFiles
from tests.e2e.stack import ROOT, Stack
from tests.fixtures.nats import LocalNatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
REQUESTS = ["penstock.v1.chat.*", "penstock.v1.completions.*", "penstock.v1.cancel.*"]
MODEL = "smollm2-135m-instruct"


def user(name: str, publish: list[str], subscribe: list[str]) -> str:
    allowed = f"publish: {{ allow: {json.dumps(publish)} }}, subscribe: {{ allow: {json.dumps(subscribe)} }}"
    return f"{{ user: {name}, password: pass, permissions: {{ {allowed} }} }}\n"


CONFIG = (
    "authorization { users: [\n{ user: operator, password: pass }\n"
    + user("tenant", REQUESTS, ["_INBOX.>", "penstock.v1.int.presence.>"])
    + user("strict", REQUESTS, ["_INBOX.>"])
    + "] }\n"
)


async def penstock(server: LocalNatsServer, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "common.cli", *words, "--nats-url", f"nats://{name}:pass@127.0.0.1:{server.port}"]
    return await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    )


async def test_a_tenant_uses_the_commands_under_the_readmes_permissions(
    nats_server_factory: Callable[[str], LocalNatsServer], tmp_path: Path, smollm2: ModelFiles
) -> None:
    server = nats_server_factory(CONFIG)
    flags = ("--engine", "simulated", "--time-scale", "0")
    async with Stack(f"nats://operator:pass@127.0.0.1:{server.port}", tmp_path, engine_flags=flags) as stack:
        for role in ("gateway", "decode"):
            await stack.start(role)
        await stack.ready()
        short = ("--max-tokens", "4")
        for words in (("generate", "Hello", *short), ("status",), ("bench", "--requests", "2", *short)):
            ended = await penstock(server, "tenant", *words)
            assert ended.returncode == 0, ended.stderr
        named = await penstock(server, "strict", "generate", "Hello", "--model", MODEL, *short)
        assert named.returncode == 0 and named.stdout.strip(), named.stderr
        unnamed = await penstock(server, "strict", "generate", "Hello", *short)
        assert unnamed.returncode == 1 and "name the model with --model" in unnamed.stderr
