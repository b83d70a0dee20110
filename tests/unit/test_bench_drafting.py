"""`bench.drafting`: which systems it starts."""

from __future__ import annotations

import anyio
import pytest

from bench.drafting import emulated, timed_draft
from bench.drafting.__main__ import Way, environ_of, flags_of, parse
from bench.drafting.simulated import Times, simulate

TINY = ["--target", "dummy:tiny-counting", "--draft", "dummy:tiny-1-layers-counting"]


def test_each_way_and_share_is_a_system_and_sees_its_gpus() -> None:
    options = parse([*TINY, "--gpus", "0,1", "--percent", "80,30"])
    assert [str(way) for way in options.ways] == ["off", "apart, 80 %", "apart, 30 %", "shared, 80 %", "shared, 30 %"]
    seen = [environ_of(way, options.gpus)["CUDA_VISIBLE_DEVICES"] for way in options.ways]
    assert seen == ["0", "0,1", "0,1", "0", "0"]
    assert not any(flag.startswith("--draft") for flag in flags_of(options.ways[0], options))
    assert "--draft-model=dummy:tiny-1-layers-counting-30" in flags_of(options.ways[2], options)


def test_one_gpu_is_shared_and_a_cpu_is_one_device() -> None:
    assert [way.name for way in parse([*TINY, "--gpus", "0", "--percent", "80"]).ways] == ["off", "shared"]
    options = parse([*TINY, "--percent", "80"])
    assert [way.name for way in options.ways] == ["off", "apart"]
    assert "--device=cpu" in flags_of(options.ways[0], options) and environ_of(Way("apart", 80), options.gpus) == {}


def test_idle_has_all_of_speculation_but_a_draft_model() -> None:
    options = parse([*TINY, "--gpus", "0", "--ways", "off,idle", "--percent", "80,30"])
    assert [str(way) for way in options.ways] == ["off", "idle"]
    off, idle = (flags_of(way, options) for way in options.ways)
    assert "--speculation-tokens=0" in off and not any(flag.startswith("--draft-model") for flag in idle)
    assert {"--draft=1", "--lookup=on"} <= set(idle) and "--speculation-tokens=0" not in idle


def test_off_is_what_others_are_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*TINY, "--ways", "apart"])
    assert "--ways begin with off" in capsys.readouterr().err


def test_simulated_drafts_give_more_the_faster_they_are_and_the_later_they_are_begun() -> None:
    def ratio(draft_ms: float, *, with_cadence: bool) -> float:
        return float(simulate(1, 80, Times(5.6, draft_ms, 0.6, 1.0), 300, with_cadence=with_cadence)[2])

    assert ratio(0.6, with_cadence=True) > ratio(1.2, with_cadence=True) > ratio(1.2, with_cadence=False) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 4])
def test_a_draft_worker_with_an_emulated_engine_drafts_for_an_emulated_target(streams: int) -> None:
    found = anyio.run(emulated.measure, ["--seconds=1.5", "--target-ms=20"], streams)
    counts = found.counts
    assert counts.tokens > 1.3 * streams * counts.steps
    assert 0 < counts.accepted <= counts.verified and 0 < counts.verifying <= streams * counts.steps
    assert found.round_trip_ms > 0
    assert emulated.row_of(streams, found, emulated.times_of(emulated.parse(["--target-ms=20"])))[0] == str(streams)


def test_times_of_an_emulation_are_those_that_are_given() -> None:
    options = emulated.parse(["--submit-ms", "0.5,0.1", "--target-ms", "4", "--verified-ms", "0.5"])
    assert emulated.times_of(options).step_s(2) == pytest.approx(0.005)
    pace = timed_draft.pace_of(options, 1000)
    assert (pace.submit, pace.submit_row, pace.draft, pace.vocab) == (0.5, 0.1, (0.85, 0.85), 1000)
    options = emulated.parse(["--draft-ms", "0.5,0.7", "--branches", "3", "--no-polling"])
    assert timed_draft.pace_of(options, 1000).draft == (0.5, 0.7)
    assert {"--draft-ms=0.5,0.7", "--branches=3", "--no-polling"} <= set(timed_draft.flags_of(options))


def test_a_timed_draft_worker_is_beside_a_target_without_one_of_its_own() -> None:
    options = parse([*TINY, "--gpus", "0", "--ways", "off,timed", "--percent", "80"])
    assert [str(way) for way in options.ways] == ["off", "timed, 80 %"]
    flags = flags_of(options.ways[1], options)
    assert "--draft=0" in flags and "--speculation-tokens=0" not in flags
    assert environ_of(options.ways[1], options.gpus) == {"CUDA_VISIBLE_DEVICES": "0"}
