"""Questions for staged blocks that fit no lease, and answers that are wrong: refused, computed anew, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Rejected, ReleaseLease
from common.protocol.transfer_messages import BlocksStaged, StageLeased
from services.prefill.streams import Leased
from tests.chaos import test_staged_handoffs
from tests.chaos.test_staged_handoffs import hosts

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")
faults, small = test_staged_handoffs.faults, test_staged_handoffs.small

CHANGES: dict[str, dict[str, Any]] = {
    "another lease": {"lease": "another"},
    "another holder": {"holder": WorkerRef("decode", "somebody", 1)},
    "no such group": {"group": 1},
    "no group": {"group": -1},
    "no blocks": {"blocks": [], "generations": []},
    "another block": {"blocks": [200], "generations": [1]},
    "a hole": {"blocks": [-1], "generations": [1]},
    "no generation": {"generations": []},
    "another generation": {"generations": [99, 99, 99]},
    "no name": {"stage": ""},
    "a name that is taken": {"stage": "first"},
}


async def test_a_question_that_fits_no_lease_is_refused(tmp_path: Path):
    async with hosts(tmp_path) as world:
        prefill, decode = world.prefill(), world.decode()
        tables = prefill.pool.allocate([3])
        prefill.pool.lease(tables)
        prefill.leases.grant("mine", decode.ref, Leased("request", 0, tables), prefill.clock() + 600)
        question = StageLeased(
            holder=decode.ref,
            lease="mine",
            stage="first",
            group=0,
            blocks=tables[0],
            generations=prefill.pool.groups[0].pool.generations_of(tables[0]),
        )
        assert isinstance(await decode.ask(prefill.ref, question, 30.0), BlocksStaged)
        for name, change in CHANGES.items():
            asked = msgspec.structs.replace(question, **({"stage": "second"} | change))
            assert isinstance(await decode.ask(prefill.ref, asked, 30.0), Rejected), name
        prefill.end_lease("mine")
        prefill.pool.release(tables)
        await world.at_rest()
        assert isinstance(await decode.ask(prefill.ref, question, 30.0), Rejected)


def moved(message: BlocksStaged, by: int) -> BlocksStaged:
    return msgspec.structs.replace(message, extents=[(address + by, count) for address, count in message.extents])


ANSWERS: dict[str, Callable[[BlocksStaged], Message]] = {
    "another epoch": lambda said: msgspec.structs.replace(said, owner=WorkerRef("prefill", "p", 1)),
    "another stage": lambda said: msgspec.structs.replace(said, stage="another"),
    "other checksums": lambda said: msgspec.structs.replace(said, checksums=[one ^ 1 for one in said.checksums]),
    "fewer checksums": lambda said: msgspec.structs.replace(said, checksums=said.checksums[:-1]),
    "no blocks": lambda said: msgspec.structs.replace(said, extents=[]),
    "another size": lambda said: msgspec.structs.replace(said, block_bytes=64),
    "outside the buffer": lambda said: moved(said, 1 << 30),
    "another kind": lambda said: ReleaseLease(leases=[]),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_wrong_answer_has_the_prompt_computed_anew(tmp_path: Path, name: str):
    async with hosts(tmp_path) as world:
        prefill, changed = world.prefill(), 0
        answer = prefill.answer

        def change(reply: str, message: Message) -> None:
            nonlocal changed
            if isinstance(message, BlocksStaged):
                changed, message = changed + 1, ANSWERS[name](message)
            answer(reply, message)

        prefill.answer = change
        with anyio.fail_after(60):
            while not changed:
                await world.crowd(1)
        assert world.total('kv_handoffs_total{outcome="ok"}') == 0
