"""Fixtures live in `tests/fixtures`: `nats.py` starts a real nats-server, `model.py` fetches real weights; `slow.py` orders;
`processes.py` shares tests out among processes; `seeds.py` draws the same tensors whatever ran before; `garbage.py` keeps
collections of garbage short; `virtual_time.py` has a clock that does not depend on the machine."""

import os

# Read when a kernel is defined: tests run kernels on the CPU, unless told otherwise for those marked `gpu`.
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # engines would take a GPU that is there, whose memory the interpreter can't read

pytest_plugins = [
    "tests.fixtures.garbage",
    "tests.fixtures.home",
    "tests.fixtures.model",
    "tests.fixtures.nats",
    "tests.fixtures.processes",
    "tests.fixtures.seeds",
    "tests.fixtures.slow",
    "tests.fixtures.two_hosts",
    "tests.fixtures.virtual_time",
]
