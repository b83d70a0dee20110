"""Stores that are not hurried."""

import pytest


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks a store grants at once does not depend on the machine's speed."""
    monkeypatch.setattr("services.kvstore.arena.MAX_GROWTH_S", 3600.0)
