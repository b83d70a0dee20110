"""Fixtures live in `tests/fixtures`: `nats.py` starts a real nats-server, `model.py` fetches real weights."""

import os

# Read when a kernel is defined: tests run kernels on the CPU, unless told otherwise for those marked `gpu`.
os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.nats"]
