"""Every command with every kind of model that a user may name: what works with the default model works with one's own.

A row is a model as it is typed (a name, a file, a link into a hub's cache, a folder, an alias, one of two on a bus), served by
one `penstock up`; a column is a command or an example, run as a user runs it, on that `up`. Engines are simulated where weights
don't matter to the question; `test_up.py` has the real default model, and the demo, which is real, stands at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.cli.demo import Site, leftovers
from common.models.naming import model_name
from common.models.source import DEFAULT_MODEL, ModelFiles
from common.protocol import subjects
from tests.e2e.test_up import ROOT, STOP_TIMEOUT_S, penstock_up
from tests.fixtures.slow import some_slow
from tests.fixtures.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(240)

SIMULATED = ("--engine", "simulated", "--time-scale", "0")
EVERY_POOL = ("--prefill", "1", "--draft", "1", "--kvstore", "1")


@dataclass(frozen=True)
class Row:
    """`name`: what clients call what `typed` means. `flags`: for `penstock up`, beside the model. `beside`: another model,
    which a second `penstock up` serves on the same bus."""

    typed: str
    name: str
    flags: tuple[str, ...] = SIMULATED
    beside: str = ""


@dataclass(frozen=True)
class Served:
    """One model on one site. Commands are run in the folder in which `up` was started, so that paths mean the same."""

    row: Row
    site: Site
    folder: Path

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.site.http_port}"

    @property
    def chosen(self) -> list[str]:
        """Flags that choose the model, where a command can't do so by itself."""
        return ["--model", self.row.name] if self.row.beside else []

    def penstock(self, *words: str, stdin: str = "", bus: bool = True) -> str:
        return self.run(
            [sys.executable, "-m", "common.cli", *words, *(("--nats-url", self.site.nats_url) if bus else ())], stdin
        )

    def run(self, command: Sequence[str], stdin: str = "") -> str:
        """Stdout of a command that must succeed."""
        ended = self.ended(command, stdin)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def ended(self, command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PENSTOCK_URL": self.http, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, input=stdin, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=90, check=False
        )


def lay_out(kind: str, folder: Path, gguf: Path) -> Row:
    """Put a model of this kind into `folder`."""
    match kind:
        case "default":
            return Row(DEFAULT_MODEL, DEFAULT_MODEL)
        case "gguf":
            _copy(gguf, folder / "My Model v1.5.gguf")
            return Row("./My Model v1.5.gguf", "My Model v1.5", (*SIMULATED, *EVERY_POOL))
        case "symlink":
            # as a hub's client keeps it: the name is the link's, its target is called by a digest
            repository = folder / "hub" / "models--owner--größe-GGUF"
            link, blob = (
                repository / "snapshots" / ("a" * 40) / "größe-Q4.gguf",
                repository / "blobs" / ("0123456789abcdef" * 4),
            )
            blob.parent.mkdir(parents=True)
            link.parent.mkdir(parents=True)
            _copy(gguf, blob)
            link.symlink_to(os.path.relpath(blob, link.parent))
            return Row(str(link), "größe-Q4")
        case "folder":
            write_tiny_model(folder / "models" / "Tiny-1.5B_Instruct")
            return Row("models/Tiny-1.5B_Instruct/", "Tiny-1.5B_Instruct")
        case "alias":
            _copy(gguf, folder / "m.gguf")
            alias = "Org/An Alias (2)"
            return Row("m.gguf", alias, (*SIMULATED, "--served-model-name", alias))
        case "two models":
            write_tiny_model(folder / "the tiny one")
            _copy(gguf, folder / "large.gguf")
            return Row("the tiny one", "the tiny one", beside="large.gguf")
    raise AssertionError(kind)


def _copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        shutil.copy(source, target)


KINDS = ("default", "gguf", "symlink", "folder", "alias", "two models")


@pytest.fixture(scope="module", params=some_slow(KINDS, quick=("gguf", "two models")))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: ModelFiles) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("matrix of " + request.param)
    row = lay_out(request.param, folder, smollm2.path)
    with penstock_up(folder, "--model", row.typed, *row.flags, cwd=folder) as (site, up):
        with _beside(row, site, folder):
            yield Served(row, site, folder)
        up.terminate()
        assert up.wait(STOP_TIMEOUT_S) == 0, (folder / "up.log").read_text()
    assert leftovers(site) == []


@contextmanager
def _beside(row: Row, site: Site, folder: Path) -> Iterator[None]:
    """The second model of a bus, served while the block runs."""
    if not row.beside:
        yield
        return
    (folder / "beside").mkdir()
    flags = ("--model", row.beside, "--nats-url", site.nats_url, "--kvstore", "0", *SIMULATED)
    with penstock_up(folder / "beside", *flags, cwd=folder, own_bus=False):
        yield


# ── the columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_up_says_the_name(served: Served) -> None:
    ends_at = time.monotonic() + 10
    while not (said := (served.folder / "up.log").read_text()).endswith("ready\n") and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert f"model       {served.row.name}," in said


def test_generate(served: Served) -> None:
    said = served.penstock("generate", "Why is the sky blue?", "--max-tokens", "8", "--model", served.row.name)
    assert said.strip()


def test_generate_from_a_pipe_for_the_only_model(served: Served) -> None:
    words = ["generate", "-", "--max-tokens", "8"]
    if not served.row.beside:
        assert served.penstock(*words, stdin="Why is the sky blue?\n").strip()
        return
    command = [sys.executable, "-m", "common.cli", *words, "--nats-url", served.site.nats_url]
    ended = served.ended(command, "Why is the sky blue?\n")
    assert ended.returncode == 1
    assert "this bus serves large, the tiny one: choose one with --model" in ended.stderr


def test_generate_by_what_was_typed_for_up(served: Served) -> None:
    """A path is understood as the model that it is served as; an alias has no path."""
    if "--served-model-name" not in served.row.flags:
        assert served.penstock("generate", "Hi", "--max-tokens", "4", "--model", served.row.typed.rstrip("/")).strip()


def test_chat(served: Served) -> None:
    said = served.penstock("chat", "--max-tokens", "8", *served.chosen, stdin="Hello\nAnd now?\n\n")
    assert len(said.strip().splitlines()) >= 2


@pytest.mark.parametrize("way", ["nats", "http"])
def test_bench(served: Served, way: str) -> None:
    words = ["bench", "--requests", "6", "--concurrency", "2", "--max-tokens", "4", "--prompt-words", "10"]
    if way == "http":
        said = served.penstock(*words, "--url", f"{served.http}/v1", bus=False)
    else:
        said = served.penstock(*words, *served.chosen)
    assert "6 requests" in said and "0 failed" in said


def test_status(served: Served) -> None:
    listed = json.loads(served.penstock("status", "--json"))
    names = {served.row.name, *([model_name(served.row.beside)] if served.row.beside else [])}
    assert {worker["model"] for worker in listed} == names
    shown = served.penstock("status")
    assert "gateway" in shown and "ready" in shown and max(map(len, shown.splitlines())) <= 80


def test_doctor(served: Served) -> None:
    said = served.penstock("doctor", "--model", served.row.typed)
    assert "workers" in said and "problem" not in said


def test_the_nats_example(served: Served) -> None:
    subject = subjects.chat(subjects.slug(served.row.name))
    said = served.run([sys.executable, str(ROOT / "examples" / "raw_nats.py"), "Hello", subject, served.site.nats_url])
    assert '"usage"' in said


def test_the_openai_example(served: Served) -> None:
    assert "generated" in served.run([sys.executable, str(ROOT / "examples" / "openai_client.py"), "Hello"])


def test_the_curl_example(served: Served) -> None:
    said = served.run(["bash", str(ROOT / "examples" / "curl.sh")])
    assert "chat.completion" in said and "[DONE]" in said


@pytest.mark.slow
def test_a_worker_by_hand_joins_under_another_spelling(served: Served) -> None:
    """The absolute path of what `up` was given as it was typed, and no alias."""
    typed = served.row.typed
    path = typed if typed == DEFAULT_MODEL else str((served.folder / typed).absolute())
    name = f"decode-by-hand-{os.getpid()}"
    flags = ["--model", path, "--worker-id", name, "--nats-url", served.site.nats_url, "--shm-dir", str(served.site.shm_dir)]
    flags += ["--http-port", "-1", "--kv-cache-mb", "64", *(SIMULATED if SIMULATED[0] in served.row.flags else ())]
    with (served.folder / "by-hand.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "services.decode", *flags],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"PENSTOCK_PARENT_PID": str(os.getpid())},
        )
    try:

        def listed() -> dict[str, Any]:
            assert worker.poll() is None, (served.folder / "by-hand.log").read_text()
            return {beat["worker"]["id"]: beat for beat in json.loads(served.penstock("status", "--json"))}

        ends_at = time.monotonic() + 90
        while listed().get(name, {}).get("state") != "ready":
            assert time.monotonic() < ends_at, "the worker is not ready"
        words = ["bench", "--requests", "24", "--concurrency", "8", "--max-tokens", "8", "--prompt-words", "10"]
        while not (workers := listed())[name]["tokens_per_s"]:
            assert time.monotonic() < ends_at, "the worker got no request"
            assert "0 failed" in served.penstock(*words)
        others = [beat for beat in workers.values() if beat["worker"]["id"] != name and beat["model"] == served.row.name]
        identities = {beat["identity"] for beat in others if beat["worker"]["role"] in ("prefill", "decode")}
        assert identities == {workers[name]["identity"]} and "" not in identities
    finally:
        worker.terminate()
        worker.wait(30)


# ── the demo starts and stops a system of its own, with real engines ─────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:-1])
def test_demo(kind: str, tmp_path: Path, smollm2: ModelFiles) -> None:
    """The default model's is in `test_up.py`; each demo has a bus of its own."""
    row = lay_out(kind, tmp_path, smollm2.path)
    command = [sys.executable, "-m", "common.cli", "demo", "Hello", "--max-tokens", "8", "--model", row.typed]
    if kind == "alias":
        command += ["--served-model-name", row.name]
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "TTFT" in ended.stdout and "no process, shared-memory segment or port is left" in ended.stderr
