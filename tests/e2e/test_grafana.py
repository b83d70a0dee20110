"""Every expression of the Grafana dashboard and of the rules, evaluated by a real Prometheus that scrapes a running Penstock of
two models, and what that Prometheus has stored."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from common.cli.net import free_port
from tests.e2e.test_operations import DASHBOARD, METRIC, OF_PROMETHEUS, RULES
from tests.e2e.test_up import ROOT, penstock_up

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
MODELS = ("dummy:tiny", "smol")
WINDOW = "8s"
FILE = """
[up]
engine = "simulated"
profile = "instant"
kv_cache_mb = 16
prefill = 1
draft = 1
kvstore = 1

[[models]]
model = "dummy:tiny"

[[models]]
model = "smollm2-135m-instruct"
served_model_name = "smol"
"""
UNDEFINED = {"Draft tokens accepted": "nothing is proposed for the simulated engine's tokens, which do not repeat"}
"""Panels that may divide by nothing here, and why."""
SILENT_RULES = {"penstock:failed_requests:rate5m": "nothing fails but by a client's fault"}
ROLES_OF = {"vllm:kv_cache_usage_perc": {"prefill", "decode"}, "vllm:num_requests_running": {"gateway"}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="no prometheus here: apt-get install prometheus"),
]


class Scraped:
    """A Penstock, and a Prometheus that scrapes it."""

    def __init__(self, penstock: str, prometheus: str) -> None:
        self.penstock = penstock
        self._prometheus = prometheus

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant vector. A PromQL mistake fails the test."""
        answer = httpx.get(f"{self._prometheus}/api/v1/query", params={"query": expression}, timeout=10).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def get(self, path: str) -> Any:
        return httpx.get(f"{self._prometheus}{path}", timeout=10).json()["data"]

    def work(self, number: int) -> None:
        """A streamed request for each model, some with the same prefix, and a mistake."""
        prompt = [number % 3 + 3, *range(5, 150)]
        for model in MODELS:
            body = {"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": True}
            assert httpx.post(f"{self.penstock}/v1/completions", json=body, timeout=30).status_code == 200
        assert (
            httpx.post(f"{self.penstock}/v1/completions", json={"model": "gpt-5", "prompt": "x"}, timeout=30).status_code == 404
        )

    def addresses(self) -> dict[str, list[str]]:
        """Metrics ports, by role."""
        found: dict[str, list[str]] = defaultdict(list)
        for target in httpx.get(f"{self.penstock}/sd", timeout=10).json():
            found[target["labels"]["role"]] += target["targets"]
        return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "models.toml").write_text(FILE)
    with penstock_up(folder, "--config", str(folder / "models.toml")) as (site, _):
        url, port = f"http://127.0.0.1:{site.http_port}", free_port()
        settings = (ROOT / "docs" / "operations.md").read_text().split("```yaml\n")[1].split("```")[0]
        settings = settings.replace("http://127.0.0.1:8000", url).replace("/etc/prometheus/", f"{RULES}/").replace("15s", "1s")
        (folder / "prometheus.yml").write_text(settings)
        command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            found = Scraped(url, f"http://127.0.0.1:{port}")
            wait_scraped(found, process, folder / "prometheus.log")
            yield found
        finally:
            process.terminate()
            process.wait(20)


def wait_scraped(found: Scraped, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until all seven processes were scraped: a gateway, prefill and decode of each model, a draft worker and a store."""
    ends_at = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < ends_at, log.read_text()[-3000:]
        try:
            up = found.query('up{job="penstock"} == 1')
        except (httpx.HTTPError, ValueError):  # it says "Service Unavailable" as it starts
            up = []
        if len(up) >= 7:
            return
        time.sleep(0.2)


def expressions(title: str) -> list[str]:
    (panel,) = [panel for panel in DASHBOARD["panels"] if panel["title"] == title]
    return [
        target["expr"].replace("$__rate_interval", WINDOW).replace("$model", "|".join(map(re.escape, MODELS)))
        for target in panel["targets"]
    ]


def is_number(value: str) -> bool:
    return not math.isnan(float(value))


def test_every_panel_shows_something(scraped: Scraped) -> None:
    missing = {title: expressions(title) for title in (panel["title"] for panel in DASHBOARD["panels"])}
    assert len(missing) == len(DASHBOARD["panels"]) > 15
    ends_at, number = time.monotonic() + 60, 0
    while missing:
        scraped.work(number)
        number += 1
        for title, wanted in list(missing.items()):
            answers = [scraped.query(expression.replace("\\", "\\\\")) for expression in wanted]
            defined = title in UNDEFINED or all(is_number(one["value"][1]) for answer in answers for one in answer)
            if all(answers) and defined:
                del missing[title]
        assert not missing or time.monotonic() < ends_at, missing


def test_the_dashboards_choice_of_models_has_both(scraped: Scraped) -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    assert variable["query"]["query"] == "label_values(vllm:num_requests_running, model_name)"
    answer = scraped.get("/api/v1/label/model_name/values?match[]=vllm:num_requests_running")
    assert answer == sorted(MODELS)


def test_a_panel_shows_the_chosen_model_alone(scraped: Scraped) -> None:
    for number in range(2):
        scraped.work(number)
    for model in MODELS:
        (one,) = scraped.query(f'sum by (model_name) (vllm:num_requests_running{{model_name=~"{model}"}})')
        assert one["metric"] == {"model_name": model}


def test_every_rule_is_evaluated_without_an_error_and_no_alert_fires(scraped: Scraped) -> None:
    scraped.work(0)
    ends_at = time.monotonic() + 60
    while True:
        (group,) = [group for group in scraped.get("/api/v1/rules")["groups"] if group["name"] == "penstock"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < ends_at
        time.sleep(0.2)
    assert len(group["rules"]) > 10
    for rule in group["rules"]:
        assert rule["health"] == "ok", rule
        answer = scraped.query(rule["query"])
        if rule["type"] == "alerting":
            assert rule["state"] == "inactive", rule
        elif rule["name"] not in SILENT_RULES:
            assert answer, rule["name"]


def test_alerts_compare_what_is_there(scraped: Scraped) -> None:
    """An alert whose metric does not exist never fires: what each compares with its limit is a series."""
    scraped.work(0)
    time.sleep(2.5)
    text = (RULES / "penstock.rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)\n\s+expr: (.*)\n", text)
    assert len(alerts) > 8
    for name, expression in alerts:
        for part in expression.split(" or "):
            compared = re.split(r" [<>]=? | == ", part)[0]
            compared = re.sub(r"\{code[^}]*\}", "", compared)
            if "failed_requests" not in compared:
                assert scraped.query(compared), (name, compared)


def test_each_vllm_name_has_one_kind_of_source_a_model_and_a_role(scraped: Scraped) -> None:
    scraped.work(0)
    time.sleep(2.5)
    roles: dict[str, set[str]] = defaultdict(set)
    models: dict[str, set[str]] = defaultdict(set)
    for series in scraped.query('{__name__=~"vllm:.*"}'):
        labels = series["metric"]
        name = OF_PROMETHEUS.sub("", labels["__name__"])
        assert labels["model_name"] in MODELS, labels
        roles[name].add(labels["role"])
        models[name].add(labels["model_name"])
    assert len(roles) > 12
    for name, found in roles.items():
        assert found == {"gateway"} or found <= {"prefill", "decode"}, (name, found)
        assert models[name] == set(MODELS), name
    assert {name: roles[name] for name in ROLES_OF} == ROLES_OF


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text; version=1.0.0"])
def test_everybodys_page_is_what_was_asked_for(scraped: Scraped, accept: str) -> None:
    scraped.work(0)
    addresses = scraped.addresses()
    assert set(addresses) == {"gateway", "prefill", "decode", "draft", "kvstore"}
    for address in (each for found in addresses.values() for each in found):
        answer = httpx.get(f"http://{address}/metrics", headers={"accept": accept}, timeout=10)
        kind = answer.headers["content-type"]
        if "openmetrics" in accept:
            assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
            families = {family.name: family for family in parse_openmetrics(answer.text)}
            assert answer.text.endswith("# EOF\n")
        else:
            assert kind == "text/plain; version=0.0.4; charset=utf-8"
            families = {family.name: family for family in parse_text(answer.text)}
            check_with_promtool(answer.content)
        assert families["penstock_messages_received"].type == "counter"
        assert not [name for name in families if name.endswith("_total")]
        assert all(family.documentation for family in families.values())


def check_with_promtool(page: bytes) -> None:
    """It must parse. Of its advice, names with colons are vLLM's, and those of the Python process are the client library's."""
    ended = subprocess.run([str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert ended.returncode in (0, 3), ended.stderr
    advice = [line for line in ended.stderr.decode().splitlines() if not re.match(r"(vllm:|python_|process_)", line)]
    assert advice == []


def test_prometheus_scrapes_openmetrics(scraped: Scraped) -> None:
    """`_created` of counters is in OpenMetrics part of the counter; a real Prometheus asks for that format first."""
    targets = scraped.get("/api/v1/targets?state=active")["activeTargets"]
    assert len(targets) >= 7
    assert all(target["health"] == "up" and not target["lastError"] for target in targets), json.dumps(targets)
    assert METRIC.search(" ".join(series["metric"]["__name__"] for series in scraped.query('{job="penstock"}')))
