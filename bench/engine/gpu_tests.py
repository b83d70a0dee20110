"""All tests marked gpu, side by side on one GPU: `python -m bench.engine.gpu_tests --at-once 10 --limit-s 280`.

Most of their time is spent compiling kernels, on one core each. So each file is a process of pytest of its own, or several
where it has many tests; those with most tests begin. Prints how each process ended and names the tests that failed. Ends with
1 if any failed, or if a process was stopped or not begun at the time limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.common.machine import ROOT, describe
from bench.common.table import markdown
from bench.engine.child import run_child

MOST_TESTS = 16
"""Of a process."""
# a GPU machine may lack plugins that pyproject.toml configures, and its libraries may warn: neither fails a test
_PYTEST = ("-m", "pytest", f"--rootdir={ROOT}", "-q", "-o", "addopts=", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
_ENVIRONMENT = {"TRITON_INTERPRET": "0"}


@dataclass(slots=True)
class Share:
    """The tests of a process."""

    tests: list[str]
    ended: str = ""
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)

    @property
    def file(self) -> str:
        return self.tests[0].partition("::")[0]


def marked_files() -> list[str]:
    """Modules with tests marked gpu; others may need packages that a GPU machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text()]


def collected(files: Sequence[str]) -> list[str]:
    """The ids of all tests marked gpu in `files`.

    :raises SystemExit: if a file can't be collected.
    """
    command = [sys.executable, *_PYTEST, "--collect-only", *files]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, check=False)
    if found.returncode not in (0, 5):  # 5: there are none
        sys.exit(found.stdout + found.stderr)
    return [line for line in found.stdout.splitlines() if "::" in line]


def shares(tests: Sequence[str]) -> list[Share]:
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    found: list[Share] = []
    for mine in by_file.values():
        count = -(-len(mine) // MOST_TESTS)
        found += [Share(mine[index::count]) for index in range(count)]
    return sorted(found, key=lambda share: -len(share.tests))


def run(share: Share, deadline: float) -> None:
    begun = time.monotonic()
    lines: list[str] = []
    limit_s = deadline - begun
    if limit_s <= 1.0:
        share.ended = "not begun"
        return
    error = run_child(
        [sys.executable, *_PYTEST, "--tb=short", *share.tests],
        lambda line: lines.append(line.decode(errors="replace").rstrip()),
        environment=os.environ | _ENVIRONMENT,
        limit_s=limit_s,
        stderr=subprocess.STDOUT,
    )
    share.seconds = time.monotonic() - begun
    share.failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    share.ended = error if error.startswith("ended after") else next((line for line in reversed(lines) if line), error)
    if error and not share.failed:
        share.failed = [f"{share.file}: {error}"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.gpu_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="of tests; all with tests marked gpu by default")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) * 5 // 8))
    parser.add_argument("--limit-s", type=float, default=0.0, help="for all together; 0: as long as it takes")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + (options.limit_s or 1e9)
    found = shares(collected(options.files or marked_files()))
    with ThreadPoolExecutor(options.at_once) as threads:
        list(threads.map(lambda share: run(share, deadline), found))
    print(describe(), end="\n\n")
    table = [[share.file, str(len(share.tests)), f"{share.seconds:.0f}", share.ended] for share in found]
    print(markdown(["file", "tests", "s", "ended"], table))
    failed = [line for share in found for line in share.failed]
    print("\n".join(failed) if failed else f"{sum(len(share.tests) for share in found)} tests, none failed")
    return 1 if failed or any(share.ended == "not begun" for share in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
