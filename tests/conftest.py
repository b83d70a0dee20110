"""Fixtures live beside what they start: `tests/fixtures/nats.py` (a real nats-server), `tests/fixtures/model.py` (real weights)."""

pytest_plugins = ["tests.fixtures.model", "tests.fixtures.nats"]
