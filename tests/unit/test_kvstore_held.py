"""What each model and tenant holds of a kvstore, as `/metrics` and `penstock status --tenants` tell it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from common.cache.prefix import owner_of
from common.cli.status_tenants import Held, Store, held_in, lines
from services.kvstore.eviction import LeafOrder
from services.kvstore.held import MAX_SERIES, OTHERS, HeldMetrics

ACME, ZOO = owner_of("acme"), owner_of("zoo")
NAMES = {ACME.hex(): "acme"}


def order_of(block_bytes: int, **num_by_owner: int) -> LeafOrder:
    order = LeafOrder(block_bytes=block_bytes)
    for tenant, count in num_by_owner.items():
        for number in range(count):
            order.add(f"{tenant}-{number}".encode(), b"", owner_of(tenant.removesuffix("_")))
    return order


def page(metrics: HeldMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_blocks_are_told_by_tier_model_and_tenant_and_cache_groups_add_up() -> None:
    first, second, other, disk = order_of(100, acme=3, zoo=1), order_of(10, acme=2), order_of(7, _=2), order_of(100, zoo=4)
    names = {"fp": "llama", "": "starting"}
    metrics = HeldMetrics(
        {"memory": lambda: [("fp", first), ("fp-1", second), ("gone", other)], "disk": lambda: [("fp", disk)]}, lambda: names
    )
    told = [
        Held(tier="memory", model="gone", tenant="", name="", blocks=2, bytes=14),
        Held(tier="memory", model="llama", tenant=ACME.hex(), name="acme", blocks=5, bytes=320),
        Held(tier="memory", model="llama", tenant=ZOO.hex(), name="", blocks=1, bytes=100),
        Held(tier="disk", model="llama", tenant=ZOO.hex(), name="", blocks=4, bytes=400),
    ]
    assert held_in(page(metrics), NAMES) == told
    names.clear()
    assert held_in(page(metrics), NAMES) == told, "a model keeps its name when its workers are gone"
    assert lines([Store(worker="kvstore-0", held=told[:2]), Store(worker="kvstore-1", problem="it hangs")]) == [
        "kvstore-0: memory gone no tenant: 2 blocks, 14 B",
        "kvstore-0: memory llama acme: 5 blocks, 320 B",
        "kvstore-1: it hangs",
    ]


def test_what_is_given_up_is_counted_no_more() -> None:
    order = order_of(1, acme=2, zoo=1)
    assert order.pop({ZOO}) == b"zoo-0" and order.pop({ACME}) is not None
    assert order.num_by_owner == {ACME: 1}
    order.close()
    assert order.num_by_owner == {}


def test_the_smallest_of_many_tenants_are_told_together() -> None:
    order = order_of(10, **{f"t{number}": 1 + number % 7 for number in range(2 * MAX_SERIES)})
    told = held_in(page(HeldMetrics({"memory": lambda: [("fp", order)]}, dict)), {})
    assert len(told) == MAX_SERIES and sum(one.blocks for one in told) == len(order)
    (others,) = [one for one in told if one.tenant == OTHERS]
    assert others.blocks == sum(one.bytes for one in told if one.tenant == OTHERS) // 10 > MAX_SERIES
    assert min(one.blocks for one in told if one.tenant != OTHERS) >= 4
