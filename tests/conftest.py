"""Fixtures live in `tests/fixtures`: `nats.py` starts a real nats-server, `model.py` fetches real weights."""

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.nats"]
