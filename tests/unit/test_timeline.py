"""What a worker's events of a request become."""

from __future__ import annotations

from common.engine.timeline import MAX_EVENTS, Event, Timeline, spans_of
from common.protocol.trace_context import child_of, traceparent
from common.runtime.spans import Span

PARENT = traceparent("ab" * 16, "cd" * 8)


def spans(line: Timeline, role: str, now: float) -> dict[str, Span]:
    made = list(spans_of(line, parent=PARENT, role=role, worker="w", facts={}, now=now))
    assert all(span.parent == child_of(PARENT, "w") for span in made[1:])
    assert made[0].parent == PARENT and made[0].own == child_of(PARENT, "w")
    assert all(span.began_at <= span.ended_at for span in made)
    return {span.name: span for span in made}


def test_a_prompt_in_chunks_that_is_handed_off() -> None:
    line = Timeline(1.0, num_computed=16, num_outputs=0)
    line.stepped(1.0, 1.5, 16, 0)  # a step of others
    line.stepped(1.5, 2.0, 48, 0)
    line.stepped(2.0, 2.5, 60, 1)
    line.note(Event("hand-off", 2.5, 2.75, peer="decode-1"))
    made = list(spans_of(line, parent=PARENT, role="prefill", worker="w", facts={}, now=3.0))
    assert [(span.name, span.began_at, span.ended_at) for span in made] == [
        ("prefill worker", 1.0, 3.0),
        ("queue", 1.0, 1.5),
        ("chunk", 1.5, 2.0),
        ("chunk", 2.0, 2.5),
        ("hand-off", 2.5, 2.75),
    ]
    assert [span.facts.get("penstock.tokens") for span in made[2:4]] == [32, 12]
    assert made[0].facts["penstock.steps"] == 2 and made[4].facts == {"penstock.peer": "decode-1"}


def test_a_sequence_that_was_pulled_and_decoded() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1)
    line.copied(Event("pull", 1.0, 1.25, peer="prefill-1"), 32)
    line.stepped(1.5, 1.75, 33, 2)
    line.stepped(1.75, 2.0, 34, 3)
    line.finished_at = 2.0
    made = spans(line, "decode", 9.0)
    assert [*made] == ["decode worker", "queue", "pull", "first step", "decode"]
    assert (made["queue"].began_at, made["queue"].ended_at) == (1.25, 1.5)
    assert (made["decode"].began_at, made["decode"].ended_at) == (1.75, 2.0)
    assert made["decode worker"].ended_at == 2.0


def test_a_prompt_that_waited_for_what_another_computed_says_so() -> None:
    line = Timeline(1.0, num_computed=16, num_outputs=0, num_cached=16)
    line.stepped(1.5, 2.0, 48, 0, 48)  # a step of others, before which it took over what they had computed
    line.stepped(2.0, 2.5, 60, 1, 48)
    made = spans(line, "prefill", 3.0)
    assert [*made] == ["prefill worker", "queue", "shared prefix", "chunk"]
    shared, chunk = made["shared prefix"], made["chunk"]
    assert (shared.began_at, shared.ended_at, shared.facts) == (1.0, 1.5, {"penstock.tokens": 32})
    assert (chunk.began_at, chunk.ended_at, chunk.facts) == (2.0, 2.5, {"penstock.tokens": 12})


def test_a_first_step_is_one_although_proposals_held() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1)
    line.copied(Event("pull", 1.0, 1.25, peer="prefill-1"), 32)
    line.stepped(1.5, 1.75, 37, 6)
    assert spans(line, "decode", 2.0)["first step"].facts == {"penstock.tokens": 5}


def test_a_pull_that_failed_is_computed_here() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1)
    line.copied(Event("pull", 1.0, 1.25, peer="prefill-1", error="stale_handle"), 0)
    line.stepped(1.5, 1.75, 33, 2)
    made = spans(line, "decode", 2.0)
    assert made["pull"].error == "stale_handle" and made["chunk"].facts == {"penstock.tokens": 33}


def test_one_that_never_ran_waited_until_it_was_let_go_of() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=0)
    line.error = "cancelled"
    made = spans(line, "decode", 4.0)
    assert [*made] == ["decode worker", "queue"] and made["queue"].ended_at == 4.0
    assert made["decode worker"].error == "cancelled"


def test_a_rewound_sequence_is_not_going_backwards() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=0)
    line.stepped(1.0, 2.0, 32, 0)
    line.stepped(2.0, 3.0, 0, 0)  # preempted: to be computed again
    line.stepped(3.0, 4.0, 33, 1)
    made = list(spans_of(line, parent=PARENT, role="decode", worker="w", facts={}, now=5.0))
    assert [span.facts["penstock.tokens"] for span in made if span.name == "chunk"] == [32, 33]


def test_the_events_of_a_long_prompt_are_bounded() -> None:
    line = Timeline(0.0, num_computed=0, num_outputs=0)
    for number in range(1, 1000):
        line.stepped(number, number + 1, 16 * number, 0)
    assert len(line.events) == MAX_EVENTS and line.num_steps == 999
    assert line.events[0].began_at == 1 and line.events[-1].began_at == 999


def test_hand_offs_that_were_refused_push_out_no_chunk() -> None:
    line = Timeline(0.0, num_computed=0, num_outputs=0)
    for number in range(1, 11):
        line.stepped(number, number + 1, 16 * number, 0)
    for number in range(1000):
        line.note(Event("hand-off", 20.0 + number, 20.5 + number, error="out_of_blocks"))
    assert [event.num_tokens for event in line.events[:10]] == [16] * 10
    assert len(line.events) == MAX_EVENTS and line.events[-1].began_at == 1019.0
