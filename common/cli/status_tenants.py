"""What `penstock status --tenants` says: what each model and tenant holds of kvstores, from the stores' `/metrics`.

Heartbeats don't have it, since every client may hear them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from common.cli.sizes import size_text
from common.protocol.messages import Presence
from common.runtime import api_keys

_TIMEOUT_S = 3.0
_BLOCKS, _BYTES = "penstock_kvstore_tenant_blocks", "penstock_kvstore_tenant_bytes"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's requests to a model have in one tier of a store. `tenant`: its id; `name`: empty if it is not known."""

    tier: str
    model: str
    tenant: str
    name: str
    blocks: int
    bytes: int


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """One kvstore; `problem`: why it can't be read."""

    worker: str
    held: list[Held] = []
    problem: str = ""


def names_in(path: Path | None) -> dict[str, str]:
    """Return the names of the tenants of a key file, by id. :raises ConfigError: it can't be read, or is no such file."""
    if path is None:
        return {}
    from common.cache.prefix import owner_of  # imports NumPy, which no other command needs

    return {owner_of(tenant).hex(): tenant for tenant in api_keys.read(path).tenants}


async def read(workers: Iterable[Presence], names: Mapping[str, str]) -> list[Store]:
    """Return what the kvstores among `workers` hold."""
    import httpx

    stores: dict[str, Store] = {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:  # a proxy does not know workers

        async def one(worker: Presence) -> None:
            id, host = worker.worker.id, f"[{worker.http_host}]" if ":" in worker.http_host else worker.http_host
            try:
                page = (await http.get(f"http://{host}:{worker.http_port}/metrics")).raise_for_status().text
                stores[id] = Store(worker=id, held=held_in(page, names))
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                stores[id] = Store(
                    worker=id, problem=f"its metrics can't be read at {host}:{worker.http_port}: {type(error).__name__}"
                )

        async with anyio.create_task_group() as group:
            for worker in workers:
                if worker.worker.role == "kvstore":
                    group.start_soon(one, worker)
    return [stores[id] for id in sorted(stores)]


def held_in(page: str, names: Mapping[str, str]) -> list[Held]:
    """Return what a store's /metrics say, by tier and model, the largest first. :raises ValueError: it is no such page."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: dict[tuple[str, str, str], dict[str, int]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples if family.name in (_BLOCKS, _BYTES) else ():
            key = sample.labels["tier"], sample.labels["model"], sample.labels["tenant"]
            counts.setdefault(key, {})[family.name] = int(sample.value)
    found = [
        Held(
            tier=tier, model=model, tenant=id, name=names.get(id, ""), blocks=count.get(_BLOCKS, 0), bytes=count.get(_BYTES, 0)
        )
        for (tier, model, id), count in counts.items()
    ]
    return sorted(found, key=lambda one: (one.tier != "memory", one.model, -one.bytes))


def lines(stores: Sequence[Store]) -> list[str]:
    """Return a line for each store, tier, model and tenant."""
    told: list[str] = []
    for store in stores:
        told += [f"{store.worker}: {store.problem}"] if store.problem else []
        for one in store.held:
            who = one.name or one.tenant or "no tenant"
            told.append(f"{store.worker}: {one.tier} {one.model} {who}: {one.blocks:,} blocks, {size_text(one.bytes)}")
    return told
