"""What is in `deploy/` fits what runs: rules and panels name metrics that exist, and Prometheus finds everybody's port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from common.models.source import ModelFiles
from tests.e2e.stack import ROOT, Stack

RULES = ROOT / "deploy" / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text())
METRIC = re.compile(r"\b(?:vllm:|penstock_)\w+")
OF_PROMETHEUS = re.compile(r"_(bucket|sum|count)$")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    engine = ("--engine", "simulated", "--profile", "instant", "--time-scale", "0", "--kv-cache-mb", "64")
    folder = tmp_path_factory.mktemp("operations")
    async with Stack(nats_server, folder, flags=("--model", smollm2.name), engine_flags=engine) as stack:
        for role in ("gateway", "prefill", "decode", "draft", "kvstore"):
            await stack.start(role)
        await stack.ready()
        yield stack


async def targets(stack: Stack) -> list[dict[str, Any]]:
    """Of all five, as soon as the gateway has heard where they are."""
    with anyio.fail_after(10):
        while True:
            found = (await stack.client.get(f"{stack.url()}/sd")).json()
            if len(found) == 5:
                return found
            await anyio.sleep(0.1)


async def test_discovery_leads_to_everybodys_metrics(stack: Stack) -> None:
    found = await targets(stack)
    labels = {target["labels"]["worker"]: target["labels"]["role"] for target in found}
    assert labels == {f"{role}-0": role for role in ("gateway", "prefill", "decode", "draft", "kvstore")}
    for target in found:
        (address,) = target["targets"]
        assert "penstock_messages_received_total" in (await stack.client.get(f"http://{address}/metrics")).text
        assert target["labels"]["__meta_penstock_model"] == "smollm2-135m-instruct"


async def test_openmetrics_has_the_same_metrics_as_the_classic_text(stack: Stack) -> None:
    for target in await targets(stack):
        url = f"http://{target['targets'][0]}/metrics"
        classic = (await stack.client.get(url)).text
        answer = await stack.client.get(url, headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
        assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert answer.headers["vary"] == "accept" and answer.text.endswith("# EOF\n")
        names = {family.name + ("_total" if family.type == "counter" else "") for family in parse_openmetrics(answer.text)}
        known = {line.split()[2] for line in classic.splitlines() if line.startswith("# TYPE")}
        assert names == {name for name in known if not name.endswith("_created")}


async def test_every_metric_of_rules_and_panels_exists(stack: Stack) -> None:
    pages = [(await stack.client.get(f"http://{target['targets'][0]}/metrics")).text for target in await targets(stack)]
    known = {line.split()[2] for page in pages for line in page.splitlines() if line.startswith("# TYPE")}
    expressions = re.findall(r"^\s*expr: (.*)$", (RULES / "penstock.rules.yml").read_text(), re.MULTILINE)
    expressions += [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    named = {OF_PROMETHEUS.sub("", name) for expression in expressions for name in METRIC.findall(expression)}
    assert len(named) > 20
    assert named <= known, named - known


async def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
@pytest.mark.parametrize("command", [("check", "penstock.rules.yml"), ("test", "penstock.test.yml")], ids=["check", "test"])
async def test_prometheus_takes_the_rules_and_they_fire(command: tuple[str, str]) -> None:
    action, name = command
    ended = subprocess.run(
        ["promtool", action, "rules", name], cwd=RULES, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0 and "SUCCESS" in ended.stdout, ended.stdout + ended.stderr


@needs_promtool
async def test_prometheus_scrapes_what_discovery_names(stack: Stack, tmp_path: Path) -> None:
    """A real Prometheus, where there is one beside promtool."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    config = (ROOT / "docs" / "operations.md").read_text().split("```yaml\n")[1].split("```")[0]
    config = config.replace("http://127.0.0.1:8000", stack.url()).replace("/etc/prometheus/", f"{RULES}/")
    config = config.replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:19095"], stdout=log, stderr=log)
    try:
        with anyio.fail_after(40):
            while True:
                with_up: dict[str, str] = {}
                try:
                    answer = await stack.client.get(
                        "http://127.0.0.1:19095/api/v1/query", params={"query": 'up{job="penstock"}'}
                    )
                    with_up = {one["metric"]["worker"]: one["value"][1] for one in answer.json()["data"]["result"]}
                except (httpx.HTTPError, KeyError, ValueError):
                    pass
                if with_up == {f"{role}-0": "1" for role in ("gateway", "prefill", "decode", "draft", "kvstore")}:
                    break
                assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
                await anyio.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
