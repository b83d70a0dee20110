"""A gateway uses workers of its model only: the same name, and the same weights."""

from __future__ import annotations

from typing import Any

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.membership import Membership


def worker(number: int, model: str = "m", identity: str = "", **fields: Any) -> Presence:
    said: dict[str, Any] = {"state": "ready", "model": model, "identity": identity, **fields}
    return Presence(worker=WorkerRef("decode", f"decode-{number}", 1), **said)


def ids(members: list[Presence]) -> list[str]:
    return [member.worker.id for member in members]


def test_other_names_are_left_alone() -> None:
    assert ids(Membership(["m"]).members([worker(1), worker(2, "other")])) == ["decode-1"]


def test_a_worker_without_an_alias_joins_a_gateway_that_has_one() -> None:
    gateway = Membership(["alias", "m"], "a")
    workers = [worker(1, "m", "a"), worker(2, "alias", "a"), worker(3, "other-alias", "a"), worker(4, "m", "b")]
    assert ids(gateway.members(workers)) == ["decode-1", "decode-2"]


def test_the_gateways_own_files_decide_which_weights_are_meant() -> None:
    mine = Membership(["m"], "a")
    assert ids(mine.members([worker(1, identity="b"), worker(2, identity="a"), worker(3)])) == ["decode-2", "decode-3"]
    assert ids(mine.members([worker(1, identity="b")])) == []


def test_without_files_the_first_ready_worker_decides_for_as_long_as_its_like_live() -> None:
    gateway = Membership(["m"])
    first, other = worker(1, identity="a"), worker(2, identity="b")
    assert gateway.members([worker(3, identity="c", state="starting")]) == []
    assert ids(gateway.members([first, other])) == ["decode-1"]
    assert ids(gateway.members([other, worker(4, identity="a", state="starting")])) == ["decode-4"]
    assert ids(gateway.members([other])) == ["decode-2"]


def test_random_weights_of_the_same_shape_are_used_but_never_beside_the_real_ones() -> None:
    gateway = Membership(["m"], "a")
    assert ids(gateway.members([worker(1, identity="dummy/a")])) == ["decode-1"]
    assert ids(gateway.members([worker(1, identity="dummy/a"), worker(2, identity="a")])) == ["decode-1"]
    assert ids(gateway.members([worker(2, identity="a")])) == ["decode-2"]


def test_an_operator_is_told_once_whom_a_gateway_leaves_alone_and_why() -> None:
    gateway = Membership(["m"], "a")
    workers = [worker(1, identity="a"), worker(2, identity="b"), worker(3, "alias", "a"), worker(4, "other", "z")]
    for _ in range(3):
        gateway.members(workers)
    told = {stranger.worker.id: f"{stranger.reason}; {stranger.advice}" for stranger in gateway.take_strangers()}
    assert told.keys() == {"decode-2", "decode-3"}
    assert "other weights as m" in told["decode-2"]
    assert "--served-model-name m" in told["decode-3"]
    gateway.members(workers)
    assert gateway.take_strangers() == []


def test_a_worker_to_which_nobody_gave_a_name_is_known_by_its_weights() -> None:
    gateway = Membership(["alias", "m"], "a")
    workers = [worker(1, "copy-of-m", "a", named=False), worker(2, "other", "b", named=False), worker(3, "x", named=False)]
    assert ids(gateway.members(workers)) == ["decode-1"]
    assert gateway.take_strangers() == []


def test_without_files_weights_that_are_in_use_are_known_under_any_name_that_was_made_of_a_path() -> None:
    gateway, workers = Membership(["m"]), [worker(1, "copy", "a", named=False), worker(2, "m", "a")]
    assert ids(gateway.members(workers[:1])) == []
    assert ids(gateway.members(workers)) == ["decode-2"]
    assert ids(gateway.members(workers)) == ["decode-1", "decode-2"]
    assert ids(gateway.members([*workers, worker(3, "copy", "a")])) == ["decode-1", "decode-2"], "it was given that name"


def test_random_weights_join_under_any_name_but_never_beside_the_real_ones() -> None:
    gateway = Membership(["m"], "a")
    assert ids(gateway.members([worker(1, "copy", "dummy/a", named=False)])) == ["decode-1"]
    both = [worker(1, "copy", "dummy/a", named=False), worker(2, "copy", "a", named=False)]
    assert ids(gateway.members(both)) == ["decode-1"]
