"""What workers tell of their prefix caches, made by hand, and an index that hears it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from common.cache.contents import HASH_TYPE
from common.cache.prefix import hash_chain, short_hash
from common.protocol import tokens as token_bytes
from common.protocol.handles import Role, WorkerRef
from common.protocol.kv_events import KvEvents, KvLayout, KvSnapshot
from services.gateway.kv_index import KvIndex
from services.gateway.prompt_chain import ChainCache, Prompt

BLOCK_TOKENS = 16
LAYOUT = KvLayout("f", BLOCK_TOKENS, [(0, 0)])


def ref(number: int = 1, epoch: int = 1, role: Role = "prefill") -> WorkerRef:
    return WorkerRef(role, f"{role}-{number}", epoch)


def tokens(count: int, first: int = 0) -> list[int]:
    return [(first * 7919 + index) % 30_000 for index in range(count)]


def hashes(prompt: list[int], *, salt: bytes = b"", fingerprint: str = "f", block_tokens: int = BLOCK_TOKENS) -> list[int]:
    return [short_hash(one) for one in hash_chain(prompt, block_tokens, fingerprint=fingerprint, salt=salt)]


def pack(shorts: Iterable[int]) -> bytes:
    return np.array(list(shorts), HASH_TYPE).tobytes()


def told(
    number: int, stored: Sequence[int] = (), removed: Sequence[int] = (), *, worker: WorkerRef | None = None, **more: Any
) -> KvEvents:
    said: dict[str, Any] = {"stored": [pack(stored)], "removed": [pack(removed)]} if stored or removed else {}
    said = {"layout": LAYOUT, **said, **more}
    return KvEvents(worker=worker or ref(), number=number, **said)


def snapshot(number: int, held: Sequence[int], *, worker: WorkerRef | None = None, offset: int = 0, **more: Any) -> KvSnapshot:
    said: dict[str, Any] = {"layout": LAYOUT, "counts": [len(held)], "hashes": pack(held), **more}
    return KvSnapshot(worker=worker or ref(), number=number, offset=offset, **said)


def lookup(prompt: list[int], salt: bytes = b"", cache: ChainCache | None = None) -> Prompt:
    return Prompt(token_bytes.pack(prompt), salt, ChainCache() if cache is None else cache)


def index(*refs: WorkerRef, max_blocks: int = 10_000) -> KvIndex:
    """An index that knows these workers, with serials from 0."""
    made = KvIndex(max_blocks)
    for serial, worker in enumerate(refs or (ref(),)):
        made.joined(worker, serial)
    return made


def answer(to: KvIndex, held: Sequence[int], number: int, now: float, worker: WorkerRef | None = None) -> None:
    """A snapshot is asked for and comes."""
    arriving = to.begin(worker or ref())
    assert arriving is not None and number >= arriving.number
    arriving.add(snapshot(number, held, worker=worker))
    assert arriving.is_complete
    to.finish(worker or ref(), arriving, now)


def held(at: KvIndex, prompt: list[int] | None = None, salt: bytes = b"") -> dict[int, int]:
    """How many tokens of a prompt each worker holds."""
    return at.match(lookup(tokens(16 * 8 + 1) if prompt is None else prompt, salt))
