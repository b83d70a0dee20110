"""compose.models.yaml, started: two models on one bus behind one gateway, and one model's container that goes and comes back.

Skipped where no container engine answers. Builds the image, so the first run takes minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.test_compose import READY_TIMEOUT_S, Project, docker, needs_engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900), needs_engine]

FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project("compose.models.yaml")
    try:
        project.run("build", "gateway")
        project.run("up", "-d")
        wait_answered(project, "smol", "tiny")
        yield project
    finally:
        project.run("down", "-v", "--timeout", "45", check=False)


def ask(project: Project, model: str, *, timeout_s: float = 60) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": FRANCE}], "max_tokens": 12, "temperature": 0}
    headers = {"penstock-deadline-ms": str(int(timeout_s * 1000))}
    url = f"http://127.0.0.1:{project.port}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=timeout_s + 5)


def text(project: Project, model: str) -> str:
    answer = ask(project, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def wait_answered(project: Project, *models: str) -> None:
    """Each of these models has answered a request."""
    ended = time.monotonic() + READY_TIMEOUT_S
    left = list(models)
    while left and time.monotonic() < ended:
        try:
            if ask(project, left[0], timeout_s=10).status_code == 200:
                left.pop(0)
                continue
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    assert not left, f"{left} did not answer:\n{project.run('logs', '--tail', '40', check=False)}"


def test_each_name_gets_its_own_models_answer(project: Project) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{project.port}", timeout=30) as http:
        listed = {model["id"] for model in http.get("/v1/models").json()["data"]}
    assert {"smol", "assistant", "tiny"} == listed
    smol = text(project, "smol")
    assert "Paris" in smol and text(project, "assistant") == smol
    assert text(project, "tiny") != smol
    unknown = ask(project, "gpt-5")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "smol" in unknown.text and "tiny" in unknown.text


def test_a_models_container_goes_and_comes_back_and_the_other_model_does_not_notice(project: Project) -> None:
    before = text(project, "tiny")
    [second] = project.containers("decode-second")
    docker("kill", "-s", "KILL", second)
    assert "Paris" in text(project, "smol")
    project.run("up", "-d", "--no-recreate")
    wait_answered(project, "tiny")
    assert text(project, "tiny") == before
