"""Which prefill and decode workers can exchange KV: not those of two hosts with a path between them that fails. Pure.

A decode worker names, in its heartbeat, the prefill workers that it has tried to read and can't read now. They are paired only
where nothing else is left: such a prompt is computed a second time by the decode worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gateway.pools import Worker

Costed = tuple[float, Worker]
"""What a part of a request costs on a worker, in seconds."""


def works(prefill: Worker, decode: Worker) -> bool:
    """Whether the decode worker can read the prefill worker's KV, as far as it knows."""
    if prefill.presence.host == decode.presence.host:
        return True
    unreachable = {agent for endpoint in decode.presence.endpoints for agent in endpoint.unreachable}
    return not unreachable or all(endpoint.agent not in unreachable for endpoint in prefill.presence.endpoints)


def cheapest(prefills: Sequence[Costed], decodes: Sequence[Costed], *, working: bool = True) -> tuple[Costed, Costed] | None:
    """Return the prefill and the decode worker that cost least together, each with its cost. `working`: only of those that can
    exchange KV; None: no two of them can."""
    pairs: Iterable[tuple[Costed, Costed]]
    if not working or not any(endpoint.unreachable for _, decode in decodes for endpoint in decode.presence.endpoints):
        pairs = [(min(prefills, key=_cost), min(decodes, key=_cost))] if prefills and decodes else []
    else:
        pairs = ((prefill, decode) for prefill in prefills for decode in decodes if works(prefill[1], decode[1]))
    return min(pairs, key=lambda pair: pair[0][0] + pair[1][0], default=None)


def _cost(found: Costed) -> float:
    return found[0]
