"""`penstock up --config models.toml`: two models behind one gateway, with real processes and simulated engines. Each answers
for itself, over HTTP, NATS and from the command line, and what happens to one's workers does not disturb the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from common.cli.demo import MARK, Site, leftovers, marked_processes
from common.engine.simulated.runner import TokenRule, expected_tokens
from common.models.source import ModelFiles, resolve
from common.protocol.messages import SamplingParams
from common.text.bundle import TextBundle, load_bundle
from tests.e2e.test_up import ROOT, STOP_TIMEOUT_S, penstock_up

pytestmark = pytest.mark.timeout(240)

SMOL, TINY = "smol", "dummy:tiny"
PROMPT = list(range(5, 75))
FILE = """
[up]
engine = "simulated"
profile = "h200-llama-8b"
kv_cache_mb = 64
kvstore = 1

[[models]]
model = "smollm2-135m-instruct"
served_model_name = ["smol", "assistant"]

[[models]]
model = "dummy:tiny"
prefill = 1
"""


@dataclass
class Served:
    site: Site
    bundles: dict[str, TextBundle]
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.site.http_port}"

    def expected(self, model: str, prompt: list[int], count: int) -> str:
        bundle = self.bundles[model]
        rule = TokenRule(len(bundle.tokenizer.byte_table(skip_special=True)))
        detokenizer = bundle.detokenizer(continues=True)
        sampling = SamplingParams(temperature=0, max_tokens=count)
        return detokenizer.push(expected_tokens(prompt, sampling, count, rule=rule)) + detokenizer.finish()

    def complete(self, model: str, prompt: list[int], count: int = 8) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/completions", json=body(model, prompt, count), timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "common.cli", *words, "--nats-url", self.site.nats_url]
        return subprocess.run(command, input=stdin, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)

    def pid_of(self, worker: str) -> int:
        lines = marked_processes(f"{MARK}={self.site.mark}")
        (pid,) = [pid for pid, line in lines if f"--worker-id {worker}-" in line]
        return pid

    def counted(self, worker: str, metric: str) -> float:
        """A metric of one worker, whose port its heartbeat tells; 0 if `status`, which listens for 0.8 s, heard none."""
        workers = json.loads(self.run("status", "--json").stdout)
        ports = [each["http_port"] for each in workers if each["worker"]["id"].startswith(worker)]
        pages = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text for port in ports]
        return sum(float(line.split()[-1]) for page in pages for line in page.splitlines() if line.startswith(metric))


def body(model: str, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelFiles) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(FILE)
    with penstock_up(folder, "--config", str(folder / "models.toml")) as (site, up):
        bundles = {SMOL: load_bundle(smollm2), TINY: load_bundle(resolve(TINY))}
        found = Served(site, bundles, folder)
        ends_at = time.monotonic() + 60
        while not all(model["ready"] for model in httpx.get(f"{found.url}/health", timeout=5).json()["models"]):
            assert time.monotonic() < ends_at, (folder / "up.log").read_text()
            time.sleep(0.1)
        yield found
        up.send_signal(signal.SIGINT)
        assert up.wait(STOP_TIMEOUT_S) == 0, (folder / "up.log").read_text()
    assert leftovers(site) == []


def test_requests_go_to_the_model_that_they_name(served: Served) -> None:
    for number in range(12):
        for model in (SMOL, TINY):
            prompt = [number + 3, *PROMPT]
            answer = served.complete(model, prompt)
            assert answer["model"] == model
            assert answer["choices"][0]["text"] == served.expected(model, prompt, 8)
    assert served.complete("assistant", PROMPT)["choices"][0]["text"] == served.expected(SMOL, PROMPT, 8)
    missing = httpx.post(f"{served.url}/v1/completions", json=body("gpt-5", PROMPT, 4), timeout=30)
    assert missing.status_code == 404 and "smol, assistant, dummy:tiny are" in missing.text
    assert [model["id"] for model in httpx.get(f"{served.url}/v1/models", timeout=5).json()["data"]] == [
        SMOL,
        "assistant",
        TINY,
    ]


def test_no_cache_crosses_models(served: Served) -> None:
    """The same token ids at both: what one has computed, in its own pool or in the store that both use, is no prefix of the
    other's."""
    prompt = list(range(100, 260))

    def cached(model: str) -> int:
        return served.complete(model, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(SMOL) == 0
    ends_at = time.monotonic() + 20
    while not cached(SMOL):
        assert time.monotonic() < ends_at, "the model's own prefix is found"
    assert cached(TINY) == 0
    while served.counted("kvstore", "penstock_kvstore_arenas") < 2:
        assert time.monotonic() < ends_at + 20, "each model's blocks are kept apart"
    assert served.complete(TINY, prompt)["choices"][0]["text"] == served.expected(TINY, prompt, 8)


def test_every_command_works_with_each_model(served: Served) -> None:
    for name in (SMOL, "assistant", TINY):
        said = served.run("generate", "Why?", "--model", name, "--max-tokens", "6")
        assert said.returncode == 0 and said.stdout.strip(), said.stderr
        bench = served.run("bench", "--model", name, *("--requests", "4", "--concurrency", "2", "--max-tokens", "4"))
        assert "0 failed" in bench.stdout, bench.stderr
    said = served.run("chat", "--model", TINY, "--max-tokens", "6", stdin="Hello\n\n")
    assert said.returncode == 0 and said.stdout.strip()
    assert "this bus serves dummy:tiny, smol: choose one with --model" in served.run("generate", "Why?").stderr
    unknown = served.run("generate", "Why?", "--model", "gpt-5").stderr
    assert "'gpt-5' is not served on this bus; assistant, dummy:tiny, smol are" in unknown
    status = json.loads(served.run("status", "--json").stdout)
    assert sorted({worker["model"] for worker in status}) == [TINY, SMOL]
    shown = served.run("status").stdout
    assert shown.index("smol\n") < shown.index("dummy:tiny\n") and shown.count("gateway-0") == 2
    log = (served.folder / "up.log").read_text()
    assert "model       smol, also called assistant, context 8,192 tokens" in log and "penstock.v1.chat.dummy-tiny" in log


async def test_killing_one_models_decode_worker_does_not_disturb_the_other(served: Served) -> None:
    texts: dict[str, str] = dict.fromkeys((SMOL, TINY), "")
    gaps: dict[str, float] = dict.fromkeys((SMOL, TINY), 0.0)
    prompt, count = [9, *PROMPT], 400
    stood_still_s = 0.0

    async def watch() -> None:
        """Note how long the machine gave no process a turn: that is nobody's disturbance."""
        nonlocal stood_still_s
        while True:
            began = time.monotonic()
            await anyio.sleep(0.01)
            stood_still_s = max(stood_still_s, time.monotonic() - began - 0.01)

    async def stream(http: httpx.AsyncClient, model: str) -> None:
        at = time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body(model, prompt, count, stream=True)) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    gaps[model] = max(gaps[model], time.monotonic() - at)
                    at = time.monotonic()
                    texts[model] += "".join(choice["text"] for choice in event["choices"])

    before = served.pid_of("decode-dummy-tiny-0")
    async with httpx.AsyncClient(base_url=served.url, timeout=90) as http, anyio.create_task_group() as group:
        group.start_soon(watch)
        async with anyio.create_task_group() as streams:
            for model in texts:
                streams.start_soon(stream, http, model)
            while not all(texts.values()):
                await anyio.sleep(0.01)
            os.kill(before, signal.SIGKILL)
        group.cancel_scope.cancel()
    assert texts == {model: served.expected(model, prompt, count) for model in texts}
    assert served.pid_of("decode-dummy-tiny-0") != before, "it was started again"
    assert gaps[SMOL] < 1.5 + stood_still_s, (gaps, stood_still_s)
    log = (served.folder / "logs" / "gateway-0.log").read_text()
    assert "peer_lost" in log and "not_ready" not in "".join(line for line in log.splitlines() if "model=smol" in line)
