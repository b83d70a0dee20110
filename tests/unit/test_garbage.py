"""When a service's garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.runtime.service import spare_what_is_loaded


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


@pytest.mark.parametrize("young", [None, 1234])
def test_what_is_there_is_spared_and_new_objects_are_counted(threshold: tuple[int, int, int], young: int | None) -> None:
    kept: list[list[int]] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    spare_what_is_loaded(young)
    assert gc.get_freeze_count() >= before + len(kept)
    assert gc.get_threshold() == (young or threshold[0], *threshold[1:])
