"""Metrics ports of a gateway's workers, in the format of Prometheus's HTTP service discovery. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from common.protocol.messages import Presence


class Target(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str]


def targets_of(presences: Iterable[Presence]) -> list[Target]:
    """One target for each that says where its HTTP port is.

    The model is a `__meta` label: as `model_name` it would displace the one that metrics bring.
    """
    return [
        Target([_address(one.http_host, one.http_port)], _labels(one)) for one in presences if one.http_port and one.http_host
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _labels(presence: Presence) -> dict[str, str]:
    return {"role": presence.worker.role, "worker": presence.worker.id, "__meta_penstock_model": presence.model}
