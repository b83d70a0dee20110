"""`penstock explain`: how it asks, and what it prints."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from common.cli.explain import ask, lines
from common.protocol import headers, subjects
from common.protocol.errors import NotFound, NoWorkers, Overloaded, ProtocolError, RequestTimeout
from common.protocol.explain_messages import Candidate, ExplainedEvent, Explanation, Explanations
from common.runtime.bus import Bus, BusMessage
from common.testing.memory_bus import MemoryBroker

ROUTED = ExplainedEvent(
    at_ms=1.5,
    event="routed",
    service="gateway",
    worker="gateway-1",
    attempt=1,
    facts={"prefill": "prefill-1", "decode": "decode-1", "path": "prefill", "reason": "because", "uncached_tokens": 60},
    candidates=[
        Candidate(part="decode", worker="decode-1", cost_ms=0.25, chosen=True),
        Candidate(part="decode", worker="decode-2", cost_ms=4.0, cached_tokens=16),
    ],
)
ONE = Explanation(
    id="chatcmpl-1",
    shown_id="mine",
    model="tiny",
    gateway="gateway-1",
    received_at=0.0,
    state="done",
    duration_ms=1234.5,
    prompt_tokens=60,
    cached_tokens=16,
    output_tokens=5,
    first_token_ms=30.25,
    finish="stop",
    events=[
        ExplainedEvent(at_ms=0.0, event="received", service="gateway", worker="gateway-1", facts={"prompt_tokens": 60}),
        ROUTED,
        ExplainedEvent(
            at_ms=8.0,
            event="KV received",
            service="decode",
            worker="decode-1",
            attempt=1,
            duration_ms=2.5,
            facts={"from": "prefill-1", "received_bytes": 3 << 20, "recomputed_tokens": 0},
        ),
    ],
)


def test_a_timeline_reads_from_top_to_bottom() -> None:
    assert list(lines(ONE)) == [
        "chatcmpl-1 (mine)  tiny",
        "60 prompt tokens (16 cached), 5 generated, the first after 30.2 ms; ended with stop after 1234.5 ms",
        "        ms      took  where      what",
        "       0.0            gateway-1  received     prompt tokens 60",
        "       1.5            gateway-1  routed       prefill-1 → decode-1: because (60 tokens to compute)",
        "                                              decode on decode-1: 0.2 ms  ← chosen",
        "                                              decode on decode-2: 4.0 ms, 16 tokens cached",
        "       8.0       2.5  decode-1   KV received  from prefill-1, received 3.0 MiB, recomputed tokens 0",
    ]


def test_attempts_are_numbered_where_there_are_several_and_silent_workers_are_named() -> None:
    moved = msgspec.structs.replace(ROUTED, attempt=2, candidates=[])
    one = msgspec.structs.replace(ONE, events=[ROUTED, moved], silent={"decode-9": "the process is gone"}, tenant="acme")
    told = list(lines(one))
    assert "try" in told[2] and told[-2].split()[:2] == ["1.5", "2"]
    assert told[-1] == "not heard: decode-9 (the process is gone)" and told[0].endswith("tenant acme")


def test_one_that_runs_says_so_and_names_cannot_write_to_the_terminal() -> None:
    told = list(lines(msgspec.structs.replace(ONE, finish="", state="handing_off", shown_id="\x1b[31m\n", events=[])))
    assert told[0] == "chatcmpl-1 (?[31m?)  tiny" and told[1].endswith("handing off for 1234.5 ms so far")


class FakeGateways:
    """So many gateways, each with its answer: a body, or the code of an error."""

    def __init__(self, *answers: bytes | str) -> None:
        broker = MemoryBroker()
        self.client: Bus = broker.connect("client")
        self.asked: list[bytes] = []
        self._buses = [broker.connect(f"gateway-{number}") for number in range(len(answers))]
        self._answers = answers

    async def start(self, group: anyio.abc.TaskGroup) -> Bus:
        for bus, answer in zip(self._buses, self._answers, strict=True):

            def hear(message: BusMessage, bus: Bus = bus, answer: bytes | str = answer) -> None:
                self.asked.append(message.data)
                fields = {headers.ERROR_CODE: answer, headers.ERROR: "no"} if isinstance(answer, str) else {}
                data = b"" if isinstance(answer, str) else answer
                if answer != "silence":
                    group.start_soon(lambda: bus.publish(message.reply, data, headers=fields))

            await bus.subscribe(subjects.explain(), hear)
        return self.client


async def answer_of(*answers: bytes | str) -> Explanations:
    gateways = FakeGateways(*answers)
    failure: Exception | None = None
    found = Explanations(requests=[])
    async with anyio.create_task_group() as group:
        bus = await gateways.start(group)
        try:
            found = await ask(bus, "x", wait_s=0.3, others_s=0.1)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    assert gateways.asked == [b'{"request":"x"}'] * len(answers)
    return found


ANSWER = msgspec.json.encode(Explanations(requests=[ONE]))


async def test_whichever_gateway_has_the_request_answers() -> None:
    assert (await answer_of("not_found", ANSWER, "not_found")).requests == [ONE]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (("not_found", "not_found"), NotFound),
        (("not_found", "overloaded"), Overloaded),
        (("silence",), RequestTimeout),
        ((b"{}",), ProtocolError),
        ((), NoWorkers),
    ],
)
async def test_without_an_answer_there_is_one_error(answers: tuple[bytes | str, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        await answer_of(*answers)
