"""compose.yaml keeps its promises: it scales, it serves, and a killed decode container loses nothing.

Skipped where no container engine answers. Builds the image, so the first run takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from common.cli.net import free_port

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 300.0
IMAGE = "penstock-test"
SCALE = {"prefill": 2, "decode": 3, "draft": 1}
ENGINES = ("prefill", "decode")
NUM_TOKENS = 500
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9090/metrics', timeout=3).read().decode())"
PROMPTS = [
    "Tell me a long story about a miller and a river.",
    "Explain step by step how a water wheel works.",
    "List twenty things that can be made of wood.",
    "Write a letter to a friend about the sea.",
]


def succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def compose_command() -> list[str] | None:
    """docker-compose, or the plugin of the same; None where there is neither, no engine, or no way to the base images."""
    if not succeeds("docker", "info"):
        return None
    for image in ("python:3.11-slim-bookworm", "nats:2.15"):
        if not succeeds("docker", "image", "inspect", image) and not succeeds("docker", "pull", image):
            return None
    for command in (["docker-compose"], ["docker", "compose"]):
        if succeeds(*command, "version"):
            return command
    return None


COMPOSE = compose_command()
needs_engine = pytest.mark.skipif(COMPOSE is None, reason="no container engine with the base images answers here")
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900), needs_engine]


class Project:
    """One compose project with a name, an image and a port of its own. `files`: what goes over compose.yaml."""

    def __init__(self, *files: str) -> None:
        self.files = [flag for file in ("compose.yaml", *files) for flag in ("-f", file)]
        self.name = f"penstocktest{os.getpid()}"
        self.port = free_port()
        self.environment = os.environ | {"PENSTOCK_IMAGE": IMAGE, "PENSTOCK_HTTP_PORT": str(self.port)}
        self.environment |= {"PENSTOCK_THREADS": "1"}

    def run(self, *arguments: str, check: bool = True) -> str:
        assert COMPOSE is not None
        command = [*COMPOSE, *self.files, "-p", self.name, *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        assert not check or ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return ended.stdout

    def up(self, *flags: str) -> None:
        self.run("up", "-d", *flags, *(flag for role, count in SCALE.items() for flag in ("--scale", f"{role}={count}")))

    def containers(self, service: str) -> list[str]:
        return self.run("ps", "-q", service).split()

    def workers(self) -> dict[str, dict[str, object]]:
        """`penstock status --json` from inside, by worker id."""
        gateway = self.containers("gateway")[0]
        listed = docker("exec", gateway, "python", "-m", "common.cli", "status", "--json")
        return {worker["worker"]["id"]: worker for worker in json.loads(listed)}

    async def busy_decode_container(self) -> str:
        """The decode container that has the most sequences running."""
        running: dict[str, float] = {}

        async def look(container: str) -> None:
            page = await anyio.to_thread.run_sync(docker, "exec", container, "python", "-c", METRICS)
            lines = [line for line in page.splitlines() if "engine_sequences_running" in line and not line.startswith("#")]
            running[container] = float(lines[0].split()[-1])

        async with anyio.create_task_group() as group:
            for container in self.containers("decode"):
                group.start_soon(look, container)
        assert max(running.values()) > 0, running
        return max(running, key=running.__getitem__)

    def resumes(self) -> float:
        """Streams that the gateway took to another worker so far."""
        page = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=5).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("penstock_request_resumes_total"))


def docker(*arguments: str) -> str:
    """Output of one docker command, both streams: logs come on stderr."""
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout or ended.stderr


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project()
    try:
        project.run("build")
        project.up()
        wait_ready(project)
        yield project
    finally:
        project.run("down", "-v", "--timeout", "45", check=False)


def wait_ready(project: Project) -> None:
    """Ready, and all compute workers have said so."""
    ended = time.monotonic() + READY_TIMEOUT_S
    with httpx.Client(base_url=f"http://127.0.0.1:{project.port}", timeout=5) as http:
        while time.monotonic() < ended:
            try:
                if http.get("/ready").status_code == 200 and num_ready(project) == sum(SCALE[role] for role in ENGINES):
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
    raise AssertionError(f"not ready after {READY_TIMEOUT_S:.0f} s:\n{project.run('logs', '--tail', '40', check=False)}")


def num_ready(project: Project) -> int:
    return sum(fields["state"] == "ready" and worker.startswith(ENGINES) for worker, fields in project.workers().items())


async def stream(http: httpx.AsyncClient, prompt: str, into: list[str]) -> None:
    """Append the text of one streamed chat to `into`, chunk by chunk."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                into.append("".join(choice["delta"].get("content") or "" for choice in chunk["choices"]))


async def stream_all(project: Project, texts: list[list[str]]) -> None:
    http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.port}", timeout=120)
    async with http, anyio.create_task_group() as clients:
        for prompt, into in zip(PROMPTS, texts, strict=True):
            clients.start_soon(stream, http, prompt, into)


async def test_a_killed_decode_container_does_not_change_the_streams(project: Project) -> None:
    undisturbed: list[list[str]] = [[] for _ in PROMPTS]
    await stream_all(project, undisturbed)
    assert all(len("".join(text)) > NUM_TOKENS for text in undisturbed)

    disturbed: list[list[str]] = [[] for _ in PROMPTS]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream_all, project, disturbed)
        while min(map(len, disturbed)) < 5:
            await anyio.sleep(0.01)
        victim = await project.busy_decode_container()
        await anyio.to_thread.run_sync(docker, "kill", "-s", "KILL", victim)
    assert ["".join(text) for text in disturbed] == ["".join(text) for text in undisturbed]
    assert project.resumes() > 0, "the kill was not in the middle of the streams"


def test_a_replica_that_was_killed_comes_back_with_the_kernels_that_are_there(project: Project) -> None:
    """Compose restarts it, and it finds in a volume what the first start compiled."""
    project.up("--no-recreate")
    began = time.monotonic()
    wait_ready(project)
    assert time.monotonic() - began < 60
    container = project.containers("decode")[0]
    assert docker("exec", container, "sh", "-c", "find /var/cache/penstock -name '*.nbc' | head -1").strip()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("common.runtime.gpu_claim", "services.decode"), "error: no GPU is visible here: install the NVIDIA container"),
        (("services.decode", "--device", "cuda:0", "--nats-url", "nats://nats:4222"), "penstock decode: device cuda:0: torch "),
    ],
)
def test_a_worker_that_is_to_have_a_gpu_and_sees_none_ends_with_a_line(
    project: Project, command: tuple[str, ...], said: str
) -> None:
    """What compose.gpu.yaml starts, on a machine without a GPU."""
    run = ["docker", "run", "--rm", "--network", f"{project.name}_default", "-e", "PENSTOCK_LOG_LEVEL=error"]
    run += ["-v", f"{project.name}_access-decode:/run/penstock-login:ro,nocopy"]
    run += ["-e", "PENSTOCK_NATS_CREDENTIALS_FILE=/run/penstock-login/login.json", IMAGE, *command]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(said)


def test_the_gpu_file_builds_torch_with_cuda_and_claims_gpus() -> None:
    assert COMPOSE is not None
    command = [*COMPOSE, "-f", "compose.yaml", "-f", "compose.gpu.yaml", "config"]
    environment = os.environ | {"PENSTOCK_DRAFT_MODEL": "/models/small"}
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout
    services = pytest.importorskip("yaml").safe_load(shown)["services"]
    assert shown.count("image: penstock-gpu") == shown.count("TORCH_INDEX: https://pypi.org/simple") == 6
    claiming = {name for name, service in services.items() if "common.runtime.gpu_claim" in (service.get("command") or [])}
    assert claiming == {name for name, service in services.items() if "nvidia" in str(service.get("deploy"))}
    assert claiming == {"prefill", "decode", "draft"}
    assert services["kvstore"]["environment"]["PENSTOCK_CAPACITY_MB"] == "6144"
    assert int(services["kvstore"]["deploy"]["replicas"]) == 0
    draft = services["draft"]
    assert draft["environment"]["PENSTOCK_DRAFT_MODEL"] == "/models/small" and "PENSTOCK_NATS_URL" in draft["environment"]
    assert any("/models" in str(volume) for volume in draft["volumes"])


def test_the_models_file_gives_each_model_its_workers() -> None:
    assert COMPOSE is not None
    command = [*COMPOSE, "-f", "compose.yaml", "-f", "compose.models.yaml", "config"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.count("PENSTOCK_CONFIG: /etc/penstock/models.toml") == 6
    assert shown.count("PENSTOCK_SERVED_MODEL_NAME: smol") == 3 and shown.count("PENSTOCK_SERVED_MODEL_NAME: tiny") == 1


def test_services_are_healthy_and_run_without_root(project: Project) -> None:
    services = ("gateway", "prefill", "draft", "kvstore")
    containers = [container for service in services for container in project.containers(service)]
    assert len(containers) == 3 + SCALE["prefill"]
    states: set[str] = set()
    ended = time.monotonic() + 90
    while states != {"healthy"} and time.monotonic() < ended:
        time.sleep(1)
        states = {docker("inspect", "-f", "{{.State.Health.Status}}", container).strip() for container in containers}
    assert states == {"healthy"}
    assert docker("exec", containers[0], "id", "-u").strip() != "0"
