"""How everyone says that they are alive, and what they could do."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.protocol.cache_messages import KvTier, KvUsage
from common.protocol.capacity import Capacity
from common.protocol.draft_messages import Drafting
from common.protocol.handles import WorkerRef
from common.protocol.kv_messages import KvTraffic
from common.protocol.transfer_messages import KvEndpoint


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """A gateway's model: its name, others for clients, whether requests are answered now, how many run and wait here, and what
    its weights are by the gateway's own files (empty: it has none)."""

    name: str
    aliases: list[str] = []
    ready: bool = False
    running: int = 0
    waiting: int = 0
    identity: str = ""


class Presence(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """everyone → everyone, four times a second: I am alive, this is my load, and this many requests I would accept.

    `host` names the shared-memory domain: workers with equal `host` can map each other's `segment`. `state` is starting, ready
    or draining. Speeds are moving averages, 0 when unknown. `loaded`: the share of its weights that a worker has loaded while
    it starts. `steps`: how many its engine has run; `step_age_ms`: age of the step that runs now, 0 for none. `model` is the
    name that clients ask for: a gateway uses the workers that serve its own. `identity` names what a worker's weights are, so
    that another model under the same name is left alone; empty: unknown. `named`: whether an operator gave it the name; where
    none did, the name is made of a path, and equal weights count instead. `max_context`: tokens that one sequence may have on
    this worker, which its KV pool may limit; 0: unknown. `draft_tokens`: proposed tokens that a decode worker has verified
    since its start; `accepted_tokens`: those of them that held. `http_host`: where `http_port` is, an address or the machine's
    name; empty: unknown. `models`: what a gateway serves, `model` first. `vocabulary`: the digest of a draft model's
    tokenizer, which its target's must equal; empty: there is none. `tiers`: a kvstore's, the fastest first. `capacity`: an
    engine's, unknown at first. `endpoints`: how workers of other hosts reach its KV; none: they don't.
    `traffic`: where its KV came from, since its start. `room`: tokens of the longest sequence for which a decode worker has
    blocks; -1: unknown.
    """

    worker: WorkerRef
    state: Literal["starting", "ready", "draining"]
    model: str = ""
    fingerprint: str = ""
    host: str = ""
    segment: str = ""
    running: int = 0
    waiting: int = 0
    credits: int = 0
    kv: KvUsage = KvUsage()
    prefill_tokens_per_s: float = 0.0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    http_port: int = 0
    loaded: float = 1.0
    identity: str = ""
    max_context: int = 0
    steps: int = 0
    step_age_ms: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    http_host: str = ""
    models: list[ServedModel] = []
    vocabulary: str = ""
    drafting: Drafting = Drafting()
    tiers: list[KvTier] = []
    capacity: Capacity = Capacity()
    endpoints: list[KvEndpoint] = []
    named: bool = True
    traffic: KvTraffic = KvTraffic()
    room: int = -1

    @property
    def served(self) -> list[ServedModel]:
        """What a gateway serves, also one of a version that announced its only model by name."""
        return self.models or [ServedModel(self.model, ready=self.state == "ready", running=self.running, waiting=self.waiting)]
