"""What hostile clients send: bodies that must be refused, with the code of the refusal, and garbage for internal subjects."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from common.protocol import cache_messages, draft_messages, messages
from common.protocol import tokens as token_bytes
from common.protocol.handles import GroupBlocks, KvHandle, WorkerRef
from tests.e2e.stack import Stack

MODEL = "smollm2-135m-instruct"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**arguments: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": HELLO, **arguments}).encode()


def completion(prompt: Any, **arguments: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **arguments}).encode()


def responses(input: Any = "Hello", **arguments: Any) -> bytes:
    return json.dumps({"model": MODEL, "input": input, **arguments}).encode()


def anthropic(**arguments: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 5, "messages": HELLO, **arguments}).encode()


BAD_PARAMETERS: list[dict[str, Any]] = [
    {"n": 10**9},
    {"n": 0},
    {"n": 1.5},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "1"},
    {"top_p": -0.1},
    {"top_k": -2},
    {"min_p": 2},
    {"seed": -2},
    {"seed": 10**40},
    {"max_tokens": -2},
    {"max_tokens": 0},
    {"frequency_penalty": 3},
    {"repetition_penalty": 0},
    {"logit_bias": {"49152": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {str(i): 1 for i in range(5000)}},
    {"stop": ["x" * 8] * 5000},
    {"stop": "x" * 100_000},
    {"stop_token_ids": [49152]},
    {"stop_token_ids": [1] * 10_000},
    {"min_tokens": 100, "max_tokens": 3},
    {"guided_regex": "a+"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
]

NO_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_parameter"),
    (b"{", "invalid_parameter"),
    (b"null", "invalid_parameter"),
    (b'{"messages": "\xff\xfe"}', "invalid_parameter"),
    (b'{"messages":' + b"[" * 100_000, "invalid_parameter"),
    (b'{"metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "invalid_parameter"),
    (b"\x00" * 1000, "invalid_parameter"),
]

CHAT: list[tuple[bytes, str]] = [
    *((chat(**arguments), "invalid_parameter") for arguments in BAD_PARAMETERS),
    (chat(model="gpt-4"), "model_not_found"),
    (chat(model="../../etc/passwd"), "model_not_found"),
    (chat(messages=[]), "invalid_parameter"),
    (chat(messages=[{"role": "user", "content": "word " * 60_000}]), "context_length_exceeded"),
    (chat(messages=HELLO * 70_000), "invalid_parameter"),
    (chat(max_tokens=10**9), "context_length_exceeded"),
    *NO_BODIES,
]

COMPLETION: list[tuple[bytes, str]] = [
    (completion(""), "empty_prompt"),
    (completion([]), "empty_prompt"),
    (completion([[]]), "empty_prompt"),
    (completion([49152]), "invalid_parameter"),
    (completion([-1]), "invalid_parameter"),
    (completion([2**40]), "invalid_parameter"),
    (completion([5] * 8192), "context_length_exceeded"),
    (completion("word " * 200_000), "context_length_exceeded"),
    (completion(["a"] * 1000), "invalid_parameter"),
    (completion(["a", 5]), "invalid_parameter"),
]

_RESULT = {"type": "function_call_output", "call_id": "none", "output": "x"}
RESPONSES: list[tuple[bytes, str]] = [
    *((responses(**arguments), "invalid_parameter") for arguments in BAD_PARAMETERS),
    (responses(model="gpt-4"), "model_not_found"),
    (responses([]), "invalid_parameter"),
    (responses([_RESULT]), "invalid_parameter"),
    (responses([{"type": "computer_call"}]), "invalid_parameter"),
    (
        responses([{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,x"}]}]),
        "invalid_parameter",
    ),
    (responses(HELLO * 70_000), "invalid_parameter"),
    (responses("word " * 60_000), "context_length_exceeded"),
    (responses(max_output_tokens=10**9), "context_length_exceeded"),
    (responses(previous_response_id="resp_1"), "invalid_parameter"),
    *NO_BODIES,
]

MESSAGES: list[tuple[bytes, str]] = [
    *((anthropic(**{"max_tokens": 5, **arguments}), "invalid_parameter") for arguments in BAD_PARAMETERS),
    (anthropic(model="gpt-4"), "model_not_found"),
    (anthropic(max_tokens=None), "invalid_parameter"),
    (anthropic(max_tokens=10**9), "context_length_exceeded"),
    (anthropic(messages=[]), "invalid_parameter"),
    (anthropic(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]), "invalid_parameter"),
    (anthropic(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), "invalid_parameter"),
    (anthropic(thinking={"type": "enabled", "budget_tokens": -5}), "invalid_parameter"),
    (anthropic(system="word " * 60_000), "context_length_exceeded"),
    *NO_BODIES,
]

BAD_BODIES = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSES, "messages": MESSAGES}
"""By path below /v1."""


def garbage(stack: Stack, dice: random.Random) -> bytes:
    """Bytes of no kind, and messages of every kind whose contents can't be."""
    gateway, prefill, decode = (stack.presence(f"{role}-0").worker for role in ("gateway", "prefill", "decode"))
    some_id = dice.choice(["a", "b", ""])
    generation = messages.Generation(
        request=some_id,
        attempt=dice.choice([-1, 0, 2**62]),
        gateway=dice.choice([gateway, WorkerRef("gateway", "nobody", 1)]),
        tokens=dice.choice([b"", b"abc", token_bytes.pack([2**32 - 1]), token_bytes.pack([1, 2, 3])]),
        prompt_tokens=dice.choice([-1, 0, 3, 2**62]),
        sampling=messages.SamplingParams(temperature=float("nan"), min_p=5, max_tokens=-1, logit_bias={-1: float("inf")}),
        deadline_ms=dice.choice([-1, 0, 2**62]),
    )
    blocks = GroupBlocks(0, dice.choice([[], [-1], [2**62]]), [1], 0, dice.choice([0, 2]))
    handle = KvHandle(
        owner=prefill,
        lease="lease",
        fingerprint=stack.presence("prefill-0").fingerprint,
        num_tokens=2,
        chain=b"",
        groups=[blocks],
    )
    row = draft_messages.DraftRow(some_id, dice.choice([-1, 0, 2**62]), [dice.choice([-1, 2**40, 3])])
    store = stack.presence("kvstore-0").worker
    made = dice.choice(
        [
            messages.DecodeTask(generation=generation),
            messages.PrefillTask(generation=generation, decode=WorkerRef("decode", "nobody", 1)),
            messages.KvReady(generation=generation, handle=handle),
            messages.KvReady(generation=msgspec.structs.replace(generation, sampling=messages.SamplingParams()), handle=handle),
            cache_messages.BlockOffer(
                holder=decode, fingerprint="x", block_bytes=dice.choice([-1, 0, 1, 2**62]), hashes=[b"", b"a"]
            ),
            cache_messages.BlockLookup(holder=decode, fingerprint="x", hashes=[b""] * 100),
            cache_messages.BlockGrant(store=store, lease="", indices=[-1], blocks=[2**62]),
            cache_messages.BlockCommit(lease=some_id, checksums=[-1]),
            messages.ReleaseLease(leases=[some_id] * 3),
            draft_messages.DraftUpdate(decode=decode, rows=[row, row]),
            draft_messages.Proposals(draft=stack.presence("draft-0").worker, rows=[row]),
            messages.FetchFrames(gateway=gateway, request=some_id, attempt=0, start=-(2**40)),
            messages.Renew(gateway=gateway, requests=[(some_id, -1)]),
            messages.Cancel(requests=[(some_id, 2**62)]),
            messages.TokenFrames(worker=decode, frames=[messages.TokenFrame(some_id, 0, -1, [-5])]),
            messages.Presence(worker=WorkerRef("decode", "decode-0", 2**62), state="ready", credits=2**40),
        ]
    )
    data = messages.encode(made)
    return dice.choice([data, data, data, data[: len(data) // 2], dice.randbytes(50), b""])
