"""The serving benchmark: what clients note of answers adds up, and one command measures a whole stack."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from bench.common.lengths import Lengths
from bench.common.machine import Machine
from bench.common.sse import Answer
from bench.common.stats import Percentiles
from bench.elastic import __main__ as elastic
from bench.serve import __main__ as command
from bench.serve import load
from bench.serve.client import Objective, Outcome, Point, TimedStream, summarise
from bench.serve.load import LoadGenerator, Plan
from bench.serve.report import EngineRate, Report, draw, render
from tests.unit.test_bench_load import HEAD, Replay, event

MACHINE = Machine(taken_at="now", commit="abc", cpu="x", cores=2, load=0.0, gpus=[], versions={})
GENEROUS = Objective(1e9, 1e9)


def outcome(sent_at: float, first_s: float, gap_s: float, tokens: int, error: str = "") -> Outcome:
    times = [] if error else [sent_at + first_s + gap_s * index for index in range(tokens)]
    return Outcome(sent_at, (times or [sent_at + 1])[-1], 10, tokens, error, times)


def point(outcomes: list[Outcome], objective: Objective = GENEROUS, begin: float = 0.0, end: float = 10.0) -> Point:
    return summarise("load", outcomes, begin=begin, end=end, wall=1000.0, objective=objective)


# -- what a client notes


def test_only_pieces_of_text_count_and_the_role_and_usage_events_do_not() -> None:
    answer = Answer(sent_at=1.0, first_at=2.0, done_at=5.0, events=5, tokens=3)
    # the role, three tokens, the usage
    noted = Outcome.of(answer, [1.5, 2.0, 3.0, 4.5, 4.6], prompt_tokens=7)
    assert noted.times == [2.0, 3.0, 4.5] and noted.error == ""
    assert (noted.ttft_s, noted.tpot_s) == (1.0, 1.25)


def test_an_answer_without_text_is_a_failure() -> None:
    assert Outcome.of(Answer(1.0, done_at=2.0), [], 3).error == "no text came"
    assert Outcome.of(Answer(1.0, done_at=2.0, error="HTTP 500"), [], 3).error == "HTTP 500"


def test_a_stream_keeps_when_each_event_came() -> None:
    chunks = [HEAD, *(event({"choices": [{"text": text}]}) for text in "abc")]
    chunks += [event({"choices": [], "usage": {"completion_tokens": 3}}), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]
    stream = TimedStream("127.0.0.1", 1)
    stream._transport = Replay(stream, chunks)
    before = time.perf_counter()
    answer = asyncio.run(stream.post("/v1/completions", b"{}"))
    assert answer.error == "" and len(stream.times) == answer.events == 4
    assert stream.times == sorted(stream.times) and before <= stream.times[0]
    assert len(Outcome.of(answer, stream.times, 1).times) == 3


# -- what that says


def test_latencies_are_of_requests_sent_in_the_window_and_tokens_of_the_window() -> None:
    # two seconds of text before the window begins, eight in it
    found = point([outcome(-3, 1.0, 0.1, 101), outcome(1, 0.5, 0.2, 11), outcome(9.5, 1.0, 0.1, 5), outcome(11, 9, 9, 9)])
    assert (found.sent, found.failed) == (2, 0)
    assert found.ttft_ms == Percentiles.of_seconds([0.5, 1.0])
    assert found.tokens_per_s == pytest.approx((81 + 11) / 10, abs=0.2)
    assert found.requests_per_s == pytest.approx(0.2)  # the first and the second ended in it
    assert found.itl_ms.p50 == pytest.approx(200, abs=0.01) and found.tpot_ms.p99 == pytest.approx(200, abs=0.01)


def test_failures_are_counted_and_are_not_good() -> None:
    found = point([outcome(1, 0.5, 0.01, 9), outcome(2, 0, 0, 0, "HTTP 429"), outcome(3, 0, 0, 0, "HTTP 429")])
    assert (found.sent, found.failed, found.errors) == (3, 2, {"HTTP 429": 2})
    assert found.good_share == pytest.approx(1 / 3)


@pytest.mark.parametrize(("ttft_ms", "tpot_ms", "good"), [(600, 30, 1.0), (400, 30, 0.0), (600, 10, 0.0)])
def test_a_request_is_good_when_both_times_are_kept(ttft_ms: float, tpot_ms: float, good: float) -> None:
    assert point([outcome(1, 0.5, 0.02, 9)], Objective(ttft_ms, tpot_ms)).good_share == good


def test_nothing_sent_is_no_error() -> None:
    found = point([])
    assert (found.sent, found.tokens_per_s, found.good_share, found.ttft_ms) == (0, 0, 0, Percentiles())


# -- load


class Instant(TimedStream):
    """Answers at once, a token each millisecond."""

    bodies: list[dict[str, object]] = []

    async def post(self, path: str, body: bytes, *, timeout_s: float = 0.0) -> Answer:
        asked = json.loads(body)
        Instant.bodies.append(asked)
        answer = Answer(time.perf_counter())
        await asyncio.sleep(0.001)
        answer.first_at = time.perf_counter()
        tokens = asked["max_tokens"]
        self.times = [answer.first_at + 0.001 * index for index in range(tokens)]
        answer.events = answer.tokens = tokens
        answer.done_at = answer.first_at
        return answer


def plan(**settings: object) -> Plan:
    given: dict[str, object] = {"prompt": Lengths(3, 9), "output": Lengths(2, 4), "seconds": 0.5, "warmup_s": 0.05} | settings
    return Plan(servers=[("h", 1), ("h", 2)], model="m", vocab=50, **given)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TimedStream", Instant)
    monkeypatch.setattr(load, "RAMP_S", 0.05)
    Instant.bodies = []


async def test_a_closed_loop_sends_what_it_was_told_to() -> None:
    found = await LoadGenerator(plan()).closed(3)
    assert found.sent > 10 and not found.failed and found.name == "3 streams"
    for body in Instant.bodies:
        prompt = body["prompt"]
        assert isinstance(prompt, list) and 3 <= len(prompt) <= 9 and all(10 <= token < 50 for token in prompt)
        assert body["ignore_eos"] is True and body["max_tokens"] in (2, 3, 4) and body["stream"] is True


async def test_several_servers_are_asked_by_turns() -> None:
    generator = LoadGenerator(plan())
    await generator.closed(3)
    servers = [server for server, streams in generator._idle.items() if streams]
    assert servers == [("h", 1), ("h", 2)]


async def test_poisson_arrivals_come_at_their_rate() -> None:
    found = await LoadGenerator(plan(seconds=1.0)).poisson(100)
    assert 60 <= found.sent <= 145  # 100 ± 4 deviations


async def test_probes_come_one_after_the_other_and_the_first_three_do_not_count() -> None:
    found = await LoadGenerator(plan(probes=4, probe_prompt=17)).probe()
    assert found.sent == 4 and {len(body["prompt"]) for body in Instant.bodies} == {17}  # type: ignore[arg-type]
    assert len(Instant.bodies) == 7


# -- the report and the command


def report() -> Report:
    draw_ = random.Random(0)
    points = [point([outcome(index / 10, draw_.random(), 0.01, 20) for index in range(90)])]
    points[0].name = "8 streams"
    engine = EngineRate(rows=8, tok_s=200.0, source="as told")
    return Report(
        machine=MACHINE,
        command="x",
        served="m",
        workers="w",
        prompt="1",
        output="2",
        objective=GENEROUS,
        engine=engine,
        points=points,
    )


def test_the_share_of_the_engine_is_of_the_same_number_of_streams() -> None:
    text = render(report())
    assert "8 streams" in text and "180.0 tok/s, 90.0% of it" in text


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(report(), tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_workers_that_share_a_gpu_share_its_memory() -> None:
    options = command.parse(["--device=cuda", "--prefill=1", "--streams=256"])
    decode, prefill = command.places(options)
    assert decode == prefill == ["--device=cuda", "--gpu-memory-utilization=0.45"]
    assert command.places(command.parse(["--device=cuda"])) == [["--device=cuda"]]
    assert command.places(command.parse(["--engine=simulated", "--decode=2"])) == [[], []]


def test_workers_are_spread_over_gpus() -> None:
    spread = command.places(command.parse(["--device=cuda", "--gpus=2", "--prefill=2"]))
    assert spread == [
        ["--device=cuda:0", "--gpu-memory-utilization=0.45"],
        ["--device=cuda:1", "--gpu-memory-utilization=0.90"],
        ["--device=cuda:0", "--gpu-memory-utilization=0.45"],
    ]


def test_elastic_asks_other_servers_in_place_of_arrangements() -> None:
    url = "http://127.0.0.1:8001,http://127.0.0.1:8002"
    options = elastic.parse([f"--url={url}", "--model=x"])
    assert options.names == [url]
    flags = elastic.flags(options, elastic.Arrangement({}), ["--rate=5"])
    assert command.parse(flags).url == url and not any(flag.startswith("--device") for flag in flags)
    assert elastic.parse(["--device=cuda", "--gpus=2"]).names == list(elastic.ARRANGEMENTS)


@pytest.mark.slow
def test_one_command_measures_a_whole_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engine=simulated", "--model=dummy:tiny", "--streams=2", "--rate=10", "--seconds=2", "--warmup-seconds=0.5"]
    flags += ["--prompt=8", "--output=5-9", "--ttft-probe=2", "--engine-throughput=1000", f"--out={tmp_path}"]
    assert command.main(flags) == 0
    found = json.loads((tmp_path / "serve.json").read_text())
    assert [each["failed"] for each in found["points"]] == [0, 0, 0] and all(each["sent"] for each in found["points"])
    text = capsys.readouterr().out
    assert "2 streams" in text and "10 requests/s" in text and "of it" in text and "idle" in text
