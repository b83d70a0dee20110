"""A tenant that asks for ten times its share takes nothing from another one: the whole system, in virtual time."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.chaos.world import Outcome, World
from tests.fixtures import virtual_time

pytestmark = pytest.mark.slow

NUM_ASKED = 80
GREEDY_AT_ONCE = 100
LINES_AT_ONCE = 64


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


class Clients:
    """Two tenants whose requests have `length` tokens and want `answer`."""

    def __init__(self, world: World, length: int, answer: int) -> None:
        self.world = world
        self.length = length
        self.answer = answer
        self.dice = random.Random(length)
        self.num_lines = 0

    def ask(self, tenant: str, *, background: bool = False) -> Outcome:
        prompt = [3 + self.dice.randrange(900) for _ in range(self.length)]
        return self.world.submit(prompt, max_tokens=self.answer, tenant=tenant, background=background)

    async def modest(self, tenant: str, every_s: float) -> list[float]:
        """Ask at random times, less than its share; return the times to the first tokens."""
        arrivals = random.Random(5)
        asked: list[Outcome] = []
        for _ in range(NUM_ASKED):
            asked.append(self.ask(tenant))
            await anyio.sleep(arrivals.expovariate(1 / every_s))
        while not all(outcome.ended for outcome in asked):
            await anyio.sleep(0.05)
        return [outcome.first_token_at - outcome.asked_at for outcome in asked]

    async def greedy(self, tenant: str) -> None:
        """Have so many requests waiting or running, always."""
        running: list[Outcome] = []
        while True:
            running = [outcome for outcome in running if not outcome.ended]
            running += [self.ask(tenant) for _ in range(GREEDY_AT_ONCE - len(running))]
            await anyio.sleep(0.02)

    async def batch(self, tenant: str) -> None:
        """Have lines of batches run as `services/gateway/batches/runner.py` does: in the room that is left, and no others."""
        running: list[Outcome] = []
        while True:
            running = [outcome for outcome in running if not outcome.ended]
            for _ in range(min(LINES_AT_ONCE - len(running), self.world.gateway.cores[0].room_behind)):
                running.append(self.ask(tenant, background=True))
                self.num_lines += 1
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.02)


def measure(
    shm_dir: Path, length: int, answer: int, every_s: float, tenants: tuple[str, str], *, batches: bool = False
) -> tuple[float, float]:
    """Return the modest tenant's p99 of the time to the first token, alone and beside the greedy one, or beside its batches."""
    found: list[float] = []

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, shm_dir, num_blocks=2048, max_running=32)
            for role in ("prefill", "decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            clients = Clients(world, length, answer)
            found.append(p99(await clients.modest(tenants[0], every_s)))
            async with anyio.create_task_group() as beside:
                beside.start_soon(clients.batch if batches else clients.greedy, tenants[1])
                await anyio.sleep(3)
                found.append(p99(await clients.modest(tenants[0], every_s)))
                assert clients.num_lines > NUM_ASKED or not batches
                beside.cancel_scope.cancel()
            await world.all_ended()
            world.check_outcomes()
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("length", "answer", "every_s"),
    [(12, 32, 0.25), (12, 96, 0.6), (60, 16, 0.25)],
    ids=["decode-is-busy", "decode-is-busy-for-long", "prefill-is-busy"],
)
def test_a_greedy_tenant_leaves_the_others_time_to_the_first_token(
    tmp_path: Path, length: int, answer: int, every_s: float
) -> None:
    alone, beside = measure(tmp_path, length, answer, every_s, ("modest", "greedy"))
    assert beside <= 1.5 * alone


def test_without_tenants_the_same_load_makes_everyone_wait(tmp_path: Path) -> None:
    alone, beside = measure(tmp_path, 12, 32, 0.25, ("", ""))
    assert beside > 10 * alone


@pytest.mark.parametrize(
    ("length", "answer", "tenants"),
    [(12, 32, ("modest", "modest")), (12, 32, ("", "")), (60, 16, ("modest", "other")), (60, 16, ("modest", "modest"))],
    ids=["decode-is-busy", "decode-is-busy-without-tenants", "prefill-is-busy-of-another-tenant", "prefill-is-busy"],
)
def test_lines_of_batches_leave_the_time_to_the_first_token(
    tmp_path: Path, length: int, answer: int, tenants: tuple[str, str]
) -> None:
    alone, beside = measure(tmp_path, length, answer, 0.25, tenants, batches=True)
    assert beside <= 1.5 * alone
