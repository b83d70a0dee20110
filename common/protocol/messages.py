"""Every message between services: one tagged msgspec Struct each, msgpack on the wire.

A field is only ever added, with a default, so that two versions can talk. Encode with `encode`, decode with `decode`;
nothing else touches msgpack. `docs/protocol.md` describes this file and the `*_messages.py` beside it.

Who sends what, in the order of one request:

    gateway → prefill   PrefillTask, ReadTask answered at once by Accepted or Rejected; ReadTask then by TokenFrames
    prefill → decode    KvPromise, KvPart, KvWithdrawn   of long prompts, while they are computed; KvWatched back
    prefill → decode    KvReady               answered at once by Accepted or Rejected
    gateway → decode    DecodeTask            the direct path: prompt and answer on one worker
    gateway → prefill   DecodeTask            the same, while decode workers have no room
    prefill → gateway   TokenFrames, HandedOff or HandoffFailed
    decode  → gateway   TokenFrames           one message per gateway per step
    gateway → worker    FramesTaken, FetchFrames, Cancel; Renew, answered by Unknown; Explain, answered by Explained
    decode  → prefill   ReleaseLease, RenewLeases; DescribeMemory, answered by MemoryDescribed, between hosts
    worker  ↔ kvstore   BlockLookup/BlockLease, BlockOffer/BlockGrant, BlockCommit, ReleaseLease, RenewLeases
    worker  → gateway   KvEvents              to every gateway; KvSnapshotRequest, answered by KvSnapshot
    decode  ↔ draft     DraftUpdate, DraftClose / Proposals, DraftResync
    everyone            Presence, EpochTaken
"""

from __future__ import annotations

from typing import Literal

import msgspec

from common.protocol.cache_messages import BlockCommit, BlockGrant, BlockLease, BlockLookup, BlockOffer
from common.protocol.cache_messages import KvUsage as KvUsage  # everyone who reads a presence takes it from here
from common.protocol.draft_messages import DraftClose, DraftResync, DraftUpdate, Proposals
from common.protocol.errors import ProtocolError
from common.protocol.explain_messages import ExplainMessage
from common.protocol.handles import KvHandle, WorkerRef
from common.protocol.kv_events import KvEventMessage
from common.protocol.presence import Presence as Presence
from common.protocol.presence import ServedModel as ServedModel
from common.protocol.stream_messages import KvPart, KvPromise, KvWatched, KvWithdrawn
from common.protocol.transfer_messages import (
    BlocksStaged,
    DescribeMemory,
    MemoryDescribed,
    StageBlocks,
    StageLeased,
    UnstageBlocks,
)

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["", "mean", "last"]
"""How hidden states become one: none are asked for; their mean; the last token's."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the token at a position is chosen. A pure function of logits, these and the position: see docs/architecture.md.

    `seed` is always set (the gateway draws one when the client gave none). Filters off: `top_k=0`, `top_p=1`, `min_p=0`.
    `logprobs`: -1 none, 0 the chosen token only, n > 0 also the n likeliest. `stop_token_ids` holds the model's
    end-of-sequence ids too, unless the client said `ignore_eos`. `grammar`, if there is one, is llguidance's text of what the
    output must match; only tokens that continue a match, or the end of a whole one, are drawn.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    grammar: str = ""


MAX_PREDICTION_TOKENS = 1 << 14
"""64 KiB of a message, beside those of a long prompt."""


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All a worker needs to begin or to continue a request.

    `tokens` (packed uint32) are the prompt and whatever earlier attempts generated; the first `prompt_tokens` of them are the
    client's. `attempt` counts up with each retry and fences frames of the attempts before. `remaining_ms` is the time that the
    request had left when this was sent: a holder frees it once so much has passed on a clock of its own, whatever the time of
    day is there. `deadline_ms`, milliseconds since 1970, is for readers that don't know `remaining_ms`. `first_token_ms`: how
    soon the first token is due by the gateway's objective; 0: none is, or it is late already. `salt` separates
    tenants' prefix caches. `alone`: workers have died with this request: run it while you hold nothing else, and take nothing
    else until it has given a token. `window`: units of frames (`frame_units`) that may be on their way to the gateway
    unacknowledged; 0: any number. `tenant`: who asked, empty for nobody in particular; tenants share a worker by `weight`, and
    within a tenant a lower `priority` is earlier. `trace`: the W3C traceparent of this attempt; empty: it is not traced.

    A prompt may be read instead of continued (`ReadTask`). `given` (packed uint32) are the tokens behind `tokens`, known
    already: they are scored, and come as frames with log-probabilities, as if they had been generated. `pooling`: the last
    frame holds the hidden states of all `tokens`, pooled.

    `prediction` (packed uint32, at most `MAX_PREDICTION_TOKENS`): a text that the answer is expected to repeat in parts. It is
    looked up like the prompt, and changes no token.
    """

    request: str
    attempt: int
    gateway: WorkerRef
    tokens: bytes
    prompt_tokens: int
    sampling: SamplingParams
    deadline_ms: int
    salt: bytes = b""
    remaining_ms: int = 0
    first_token_ms: int = 0
    alone: bool = False
    window: int = 0
    given: bytes = b""
    pooling: Pooling = ""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    trace: str = ""
    prediction: bytes = b""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, before temperature and filters: the chosen token's, and the likeliest.

    `rank`, of a prompt's token: how many tokens are likelier, plus 1; 0: not told.
    """

    # tuples: a gateway may hold a million of these, and lists would be gone through at each garbage collection
    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


class TokenFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one request. `start` is the first one's index in the output (0 = first generated token).

    A receiver drops tokens before the index it expects, and fetches again when `start` is beyond it. `embedding`, in the last
    frame of a prompt that was read for it: float32, little-endian, of length 1 as a vector.
    """

    request: str
    attempt: int
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = -1
    error_code: str = ""
    error_message: str = ""
    embedding: bytes = b""


class TokenFrames(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → gateway: tokens of one engine step that belong to this gateway, or of several, while it was behind.

    `number` counts a worker's messages to one gateway, from 1; 0 in those that need no acknowledgement.
    """

    worker: WorkerRef
    frames: list[TokenFrame]
    number: int = 0


def frame_units(frame: TokenFrame) -> int:
    """Return what a frame costs its gateway, roughly, in units of 40 µs: one of a single token is one unit, and every two more
    tokens, or alternatives of tokens, are another, and so are 256 bytes of an embedding."""
    num_values = len(frame.tokens) * (1 + len(frame.logprobs[0].top_tokens) if frame.logprobs else 1)
    return 1 + num_values // 2 + len(frame.embedding) // 256


class FramesTaken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → worker: I have worked through your TokenFrames up to `number`; `window` is as in `Generation`, from now on."""

    gateway: WorkerRef
    number: int
    window: int


class PrefillTask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → prefill: compute the prompt, send me the first token, and hand the KV to `decode`."""

    generation: Generation
    decode: WorkerRef


class ReadTask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → prefill, or decode where there is no prefill worker: read the prompt as `generation` asks, generate nothing."""

    generation: Generation


class DecodeTask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → decode, or prefill: compute the prompt yourself, then generate."""

    generation: Generation


class KvReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → decode: the KV of all but the last token is readable behind `handle` until the lease ends.

    `generation.tokens` ends with the token that prefill sampled; `first_logprobs` are that token's, when asked for.
    `cached_tokens` of the prompt came from a prefix cache. `stream`: the one whose parts came before, with the handle's lease.
    """

    generation: Generation
    handle: KvHandle
    first_logprobs: TokenLogprobs | None = None
    cached_tokens: int = -1
    stream: str = ""


class Accepted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer to a task: the sender now holds the request, and frees it when nobody renews it."""

    worker: WorkerRef


class Rejected(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer to a task: nothing was taken; `code` is one of `errors`."""

    worker: WorkerRef
    code: str
    message: str


class HandedOff(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → gateway: `decode` accepted the request; from here on it sends the frames."""

    worker: WorkerRef
    request: str
    attempt: int
    decode: WorkerRef


class HandoffFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → gateway: the decode worker did not take the request; I hold its KV for a lease. Answer with Redirect."""

    worker: WorkerRef
    request: str
    attempt: int
    code: str


class Redirect(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → prefill: hand the finished prompt of `request` to `decode` instead."""

    request: str
    attempt: int
    decode: WorkerRef


class FetchFrames(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → decode or prefill: send the tokens of `request` from output index `start` again (a gap was seen)."""

    gateway: WorkerRef
    request: str
    attempt: int
    start: int


class Cancel(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → any holder: free these requests now, attempts up to and including `attempt`. Harmless twice.
    Also how a gateway lets go of a finished request, whose tokens the worker keeps until then for `FetchFrames`.
    """

    requests: list[tuple[str, int]]


class Renew(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → any holder, once a second: I still want these (request, attempt); free what I no longer name."""

    gateway: WorkerRef
    requests: list[tuple[str, int]]


class Unknown(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → gateway: you renewed these, and I don't hold them."""

    worker: WorkerRef
    requests: list[tuple[str, int]]


class EpochTaken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """anyone → a worker: a later life of yours than the one you speak for has been heard, and is over; begin one after `epoch`.

    The worker's clock was set back, or its predecessor's was ahead; nobody listens to it until it takes a later epoch.
    """

    epoch: int


class RenewLeases(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """reader → owner, once a second: I am still reading behind these leases."""

    holder: WorkerRef
    leases: list[str]


class ReleaseLease(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """reader → owner: done reading. Harmless twice. For a grant of a kvstore: I will not write; take the blocks back.

    `damaged` (kvstore only): hashes of blocks read under these leases that failed their checksum: forget them.
    """

    leases: list[str]
    damaged: list[bytes] = []


Message = (
    TokenFrames
    | FramesTaken
    | PrefillTask
    | ReadTask
    | DecodeTask
    | KvPart
    | KvPromise
    | KvWatched
    | KvWithdrawn
    | KvReady
    | Accepted
    | Rejected
    | HandedOff
    | HandoffFailed
    | Redirect
    | FetchFrames
    | Cancel
    | Renew
    | Unknown
    | RenewLeases
    | ReleaseLease
    | BlockLookup
    | BlockLease
    | BlockOffer
    | BlockGrant
    | BlockCommit
    | DescribeMemory
    | MemoryDescribed
    | StageBlocks
    | StageLeased
    | BlocksStaged
    | UnstageBlocks
    | DraftUpdate
    | DraftClose
    | Proposals
    | DraftResync
    | EpochTaken
    | ExplainMessage
    | KvEventMessage
    | Presence
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """:raises ProtocolError: if `data` is not one of the messages above."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a Penstock message: {error}") from error
