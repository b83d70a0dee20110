"""Every benchmark says what it does with what Penstock itself needs installed: no extra, no test tool."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
    for path in (ROOT / "bench").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
RUN = """
import contextlib, io, json, os, runpy, sys

class WithoutExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in extras:
            return None
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)

    def find_distributions(self, *context):  # packages ask for their own versions
        for finder in finders:
            yield from finder.find_distributions(*context) if hasattr(finder, "find_distributions") else ()

extras, finders = set(json.loads(sys.argv[1])), list(sys.meta_path)
sys.meta_path[:] = [WithoutExtras()]
for package in ("torch", "numba", "triton", "httpx", "nats", "structlog"):  # once, and not in each child
    with contextlib.suppress(ImportError):
        __import__(package)
commands, folder, processors, started = json.loads(sys.argv[2]), sys.argv[3], len(os.sched_getaffinity(0)), []
for number, command in enumerate(commands):
    sys.stdout.flush()
    if number >= processors:
        os.waitpid(started[number - processors], 0)
    started.append(os.fork())
    if not started[-1]:
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = command
            try:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                status = ended.code or 0
                if isinstance(status, str):
                    err.write(status)
                    status = 1
            except BaseException as error:
                status = f"Traceback: {error!r}"
        with open(os.path.join(folder, str(number)), "w") as said:
            json.dump([status, out.getvalue(), err.getvalue()], said)
        os._exit(0)
for child in started[-processors:]:
    os.waitpid(child, 0)
"""


def run(*commands: list[str]) -> list[tuple[int | str, str, str]]:
    """Exit status, stdout and stderr of each, where only what a runtime install has can be imported."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(sorted(extras())), json.dumps(commands), folder]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return [tuple(json.loads((Path(folder) / str(number)).read_text())) for number in range(len(commands))]


def extras() -> set[str]:
    """Top-level modules of packages that are installed here, and that a runtime install lacks."""
    needed: set[str] = {"penstock"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in needed or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed.add(name)
        try:
            waiting += [Requirement(line) for line in importlib.metadata.distribution(name).requires or []]
        except importlib.metadata.PackageNotFoundError:
            continue
    providers = importlib.metadata.packages_distributions()
    found = {module for module, packages in providers.items() if not any(normal(package) in needed for package in packages)}
    assert found >= {"psutil", "matplotlib", "pytest", "transformers", "openai"}
    assert not found & {"torch", "nats", "msgspec", "numba"}
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_help_needs_nothing_that_a_runtime_install_lacks() -> None:
    assert len(COMMANDS) > 20
    for command, (status, out, err) in zip(COMMANDS, run(*([command, "--help"] for command in COMMANDS)), strict=True):
        assert (status, out[:7]) == (0, "usage: "), f"{command}: {status} {err[-500:]}"


def test_what_is_missing_or_nonsense_is_said_without_a_traceback() -> None:
    cases = [
        (["bench.control_plane", "--seconds", "1"], "pip install 'penstock[bench]'"),
        (["bench.serve.load", "{"], "usage: "),
        (["bench.engine.observe", "[]"], "usage: "),
        (["bench.cpu.peers", "nobody", "{}"], "usage: "),
        (["bench.control_plane.farm", "--role", "decode"], "usage: "),
    ]
    for (command, said), (status, _, err) in zip(cases, run(*(command for command, _ in cases)), strict=True):
        assert said in err, f"{command}: {status} {err}"
        assert status in (1, 2), f"{command}: {status}"
