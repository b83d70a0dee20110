"""Fixtures live in `tests/fixtures`: `nats.py` starts a real nats-server, `model.py` fetches real weights."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: tests run kernels on the CPU

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.nats"]
