"""Flags of `penstock up` on real processes: secrets stay secret, a flag wins, and a small context holds everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from common.cli.demo import MARK, marked_processes
from common.models.source import ModelFiles
from tests.e2e.test_up import penstock_up, run
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.slow import some_slow

pytestmark = pytest.mark.timeout(120)

SIMULATED = ("--engine", "simulated", "--time-scale", "0", "--draft", "1", "--prefill", "1")
KEY, PASSWORD = "a-very-s3cret-key", "pa55word-of-the-bus"


@pytest.mark.parametrize("way", some_slow(["variables", "flags", "file"], quick=["variables"]))
def test_no_secret_stands_on_a_command_line_or_in_a_log(
    way: str, tmp_path: Path, smollm2: ModelFiles, nats_server_factory: Callable[[], LocalNatsServer]
) -> None:
    url = nats_server_factory().url.replace("nats://", f"nats://somebody:{PASSWORD}@")
    environment = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_NATS_URL": url} if way == "variables" else {}
    flags = ["--api-key", KEY, "--nats-url", url] if way == "flags" else []
    if way == "file":
        file = tmp_path / "penstock.toml"
        file.write_text(f'[common]\nnats_url = "{url}"\n[gateway]\napi_key = "{KEY}"\n')
        flags = ["--config", str(file)]
    with penstock_up(tmp_path, *SIMULATED, *flags, own_bus=False, environment=environment) as (site, up):
        lines = {pid: line for pid, line in marked_processes(f"{MARK}={site.mark}") if pid != up.pid}
        assert len(lines) >= 5
        for line in lines.values():
            assert KEY not in line and PASSWORD not in line
        api = f"http://127.0.0.1:{site.http_port}/v1"
        assert httpx.get(f"{api}/models").status_code == 401
        assert httpx.get(f"{api}/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
        bench = [sys.executable, "-m", "common.cli", "bench", "--requests", "2", "--max-tokens", "4", "--url", api]
        assert "0 failed" in run(bench, PENSTOCK_API_KEY=KEY)
        assert subprocess.run(bench, capture_output=True, check=False).returncode == 1
    for log in (tmp_path / "up.log", *(tmp_path / "logs").glob("*")):
        assert KEY not in log.read_text() and PASSWORD not in log.read_text(), log


@pytest.mark.slow
def test_naming_a_port_starts_a_bus_whatever_is_exported(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, *SIMULATED, environment={"PENSTOCK_NATS_URL": "nats://127.0.0.1:9"}) as (site, _):
        assert "ready" in run([sys.executable, "-m", "common.cli", "status", "--nats-url", site.nats_url])


@pytest.mark.parametrize("flags", [("--max-model-len", "300"), pytest.param(("--num-blocks", "20"), marks=pytest.mark.slow)])
def test_the_context_is_one_for_gateway_and_engines(flags: tuple[str, ...], tmp_path: Path, smollm2: ModelFiles) -> None:
    """Limited by the operator, or by a small KV pool: clients are told, and a prompt beyond it is a 400 at the gateway."""
    context = 300 if flags[0] == "--max-model-len" else 19 * 16
    with penstock_up(tmp_path, *SIMULATED, *flags) as (site, _), httpx.Client(timeout=30) as http:
        api = f"http://127.0.0.1:{site.http_port}/v1"
        [model] = http.get(f"{api}/models").json()["data"]
        assert model["max_model_len"] == context
        body = {"model": model["id"], "prompt": [5] * (context - 10), "temperature": 0, "ignore_eos": True}
        for max_tokens in (10, context):
            whole = http.post(f"{api}/completions", json=body | {"max_tokens": max_tokens}).json()
            assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (10, "length")
        for too_much in ({"max_tokens": context + 1}, {"prompt": [5] * context, "max_tokens": 1}):
            refused = http.post(f"{api}/completions", json=body | too_much)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    said = (tmp_path / "up.log").read_text()
    assert f"context {context} tokens" in said
    assert ("the KV pool holds sequences of 304 tokens, the model takes 8,192" in said) == (flags[0] == "--num-blocks")


def test_an_open_api_without_a_key_is_warned_of(tmp_path: Path, smollm2: ModelFiles) -> None:
    for number, (flags, warned) in enumerate(
        ((("--http-host", "0.0.0.0"), True), (("--http-host=0.0.0.0", "--api-key=k"), False))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with penstock_up(folder, *SIMULATED, *flags):
            pass
        assert ("without a key: whoever reaches this machine may use it" in (folder / "up.log").read_text()) == warned


@pytest.mark.slow
def test_without_a_terminal_up_says_what_it_waits_for(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, *SIMULATED):
        pass
    said = (tmp_path / "up.log").read_text()
    assert "starting gateway-0, prefill-0, decode-0, draft-0, kvstore-0 with smollm2-135m-instruct" in said
    assert "waiting for " in said
