"""`penstock demo`: every pool once, on ports of its own: start, ask over NATS, stop, and prove that nothing is left.

`make demo` runs it. It fails, with a status that is not zero, if the answer does not come, or if a process, a
shared-memory segment or a port outlives it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from common.cli import owned_folder
from common.cli.chunks import Answer, Timing
from common.cli.client import connected, served_model
from common.cli.console import err, out, run
from common.cli.generate import chat_body, conversation, stream_answer
from common.cli.model_names import local_models
from common.cli.net import claimed_port, http_status, is_free
from common.cli.pull import Spec, ensure
from common.models.source import DEFAULT_MODEL
from common.protocol.errors import InternalError
from common.runtime.bus_login import BusLogin
from common.runtime.parent_death import PARENT_VARIABLE
from common.runtime.python_module import python_module
from common.runtime.sections import ROLES

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
SHM_BYTES = 3 << 30
"""KV blocks of a prefill and a decode worker, and of a kvstore."""
KEPT = ("PENSTOCK_HOME", "PENSTOCK_KERNEL_CACHE")
"""Variables of ours that a demo's processes see: where things are kept. Settings would make it another demo."""
MARK = "PENSTOCK_DEMO"
"""In the environment of every process of a demo, so that whatever outlives it is found."""


class Site(msgspec.Struct, frozen=True):
    """Where one demo runs: nothing of it is shared with another Penstock on this machine."""

    http_port: int
    nats_port: int
    shm_dir: Path
    mark: str

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"


def command(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask.")] = "Why is the sky blue?",
    spec: Spec = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="Longest answer, in tokens.")] = 64,
    model: Annotated[
        str, typer.Option("--model", metavar="SPEC", autocompletion=local_models, help="In place of the argument SPEC.")
    ] = "",
    served_model_name: Annotated[
        str, typer.Option("--served-model-name", metavar="NAME", help="What clients call the model. Default: its own name.")
    ] = "",
) -> None:
    """Start everything, stream one answer over NATS, stop everything, check that nothing is left."""
    ensure(model or spec)
    with _site() as site:
        with _penstock_up(site, model or spec, served_model_name) as up:
            began = time.monotonic()
            run(lambda: _until_ready(site, up))
            err.print(f"ready after {time.monotonic() - began:.1f} s")
            timing = run(lambda: _ask(site, prompt, max_tokens))
            out.print(f"{timing}")
            _stop(up)
        left = leftovers(site)
    if left:
        raise InternalError("something outlived the demo:\n  " + "\n  ".join(left))
    err.print("stopped: no process, shared-memory segment or port is left")


@contextmanager
def _site() -> Iterator[Site]:
    with (
        own_folder(_shared_memory() or tempfile.gettempdir(), "demo-penstock-") as shm_dir,
        claimed_port(0, "--http-port") as http_port,
        claimed_port(0, "--nats-port") as nats_port,
    ):
        yield Site(http_port, nats_port, shm_dir, f"{os.getpid()}-{time.time_ns()}")


@contextmanager
def own_folder(base: str | Path, prefix: str) -> Iterator[Path]:
    """A folder of this demo; those of demos that were killed are removed first."""
    owned_folder.sweep(Path(base).glob(f"{prefix}*"))
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    with owned_folder.owned(folder):
        try:
            yield folder
        finally:
            owned_folder.remove(folder)


def _shared_memory(directory: Path = Path("/dev/shm")) -> Path | None:
    """Return `directory` if it can be written and has room for a demo's KV blocks, which a container's 64 MiB have not. None:
    the folder for temporary files is to be used."""
    try:
        enough = shutil.disk_usage(directory).free >= SHM_BYTES
    except OSError:
        return None
    return directory if enough and os.access(directory, os.W_OK | os.X_OK) else None


@contextmanager
def _penstock_up(site: Site, model: str, served_model_name: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock up` as a process of its own, ended when the block ends, however it ends, or with this process."""
    flags = ["--model", model, "--http-port", str(site.http_port), "--nats-port", str(site.nats_port)]
    flags += ["--shm-dir", str(site.shm_dir), "--served-model-name", served_model_name]
    flags += [f"--{role}=1" for role in ROLES]  # all there are, wanted by this machine or not
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_") or name in KEPT}
    with (
        own_folder(tempfile.gettempdir(), "demo-penstock-data-") as folder,
        subprocess.Popen(
            python_module(
                "common.runtime.parent_death",
                ["SIGTERM", *python_module("common.cli", ["up", *flags, "--data-dir", str(folder / "data")])],
            ),
            env=clean | {MARK: site.mark, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as up,
    ):
        try:
            yield up
        finally:
            if up.poll() is None:
                _stop(up)


async def _until_ready(site: Site, up: subprocess.Popen[bytes]) -> None:
    with anyio.move_on_after(READY_TIMEOUT_S):
        while await http_status(site.http_port, "/ready") != 200:
            if up.poll() is not None:
                raise InternalError("`penstock up` ended before it was ready; what it printed stands above")
            await anyio.sleep(0.1)
        return
    raise InternalError(f"not ready after {READY_TIMEOUT_S:.0f} s: `penstock doctor` may know why")


async def _ask(site: Site, prompt: str, max_tokens: int) -> Timing:
    async with connected(site.nats_url, "demo", login=BusLogin()) as bus:
        model = await served_model(bus)
        err.print(f"[bold]{prompt}[/]")
        body = chat_body(conversation("", prompt), max_tokens=max_tokens, temperature=0, seed=1)
        answer = await stream_answer(bus, model, body, Answer())
    if not answer.text.strip():
        raise InternalError("the answer was empty")
    return answer.timing


def _stop(up: subprocess.Popen[bytes]) -> None:
    up.send_signal(signal.SIGTERM)
    try:
        status = up.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        up.kill()
        raise InternalError(f"`penstock up` did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None
    if status != 0:
        raise InternalError(f"`penstock up` ended with status {status}")


def leftovers(site: Site) -> list[str]:
    """What a stopped demo left behind, one line each."""
    left = [f"process {pid}: {command_line}" for pid, command_line in marked_processes(f"{MARK}={site.mark}")]
    left += [f"shared memory {path}" for path in site.shm_dir.iterdir() if path.name != owned_folder.LOCK]
    left += [f"port {port}" for port in (site.http_port, site.nats_port) if not is_free(port)]
    return left


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Processes that were started with `mark` in their environment."""
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found.append((int(folder.name), b" ".join(words).decode(errors="replace").strip()))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found
