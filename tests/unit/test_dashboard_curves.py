"""Points of the dashboard's curves: rates and quantiles of the last seconds, from counters that only grow."""

from __future__ import annotations

from services.gateway.curves import KEEP_POINTS, WINDOW_S, Acceptance, Curves, Point, Totals, added, quantile
from tests.unit.presences import presence

BOUNDS = (0.1, 1.0, 10.0)


def totals(now: float, **more) -> Totals:
    return Totals(
        **{"now": now, "tokens": 0, "requests": 0, "ttft": (), "itl": (), "draft_tokens": 0, "accepted_tokens": 0, **more}
    )


def sample(curves: Curves, now: float, **more) -> Point:
    return curves.sample(totals(now, **more), BOUNDS, at=1000 + now, running=1, waiting=0)


def test_a_quantile_lies_in_the_bucket_of_its_observation() -> None:
    assert quantile((BOUNDS, (0, 0, 0, 0)), 0.5) is None
    assert quantile((BOUNDS, (2, 0, 0, 0)), 0.5) == 0.05
    assert quantile((BOUNDS, (5, 4, 1, 0)), 0.5) == 0.1
    assert 1.0 < (quantile((BOUNDS, (5, 4, 1, 0)), 0.95) or 0) <= 10.0
    assert quantile((BOUNDS, (0, 0, 0, 7)), 0.5) == 10.0, "nothing is known beyond the last bound"


def test_rates_are_of_the_last_seconds_and_nothing_is_nothing() -> None:
    curves = Curves()
    first = sample(curves, 0.0)
    assert (first.tokens_per_s, first.ttft_p50_ms, first.acceptance) == (0.0, None, None)
    rush = [sample(curves, float(second), tokens=100 * second, requests=second) for second in range(1, 6)]
    assert (rush[-1].tokens_per_s, rush[-1].requests_per_s) == (100.0, 1.0)
    after = [sample(curves, float(second), tokens=500, requests=5) for second in range(6, 12)]
    assert after[-1].tokens_per_s == 0.0, "an old rush is over"


def test_quantiles_forget_what_is_older_than_their_window() -> None:
    curves = Curves()
    sample(curves, 0.0, ttft=(0, 0, 0, 0))
    slow = sample(curves, 1.0, ttft=(0, 0, 4, 0))
    assert slow.ttft_p50_ms is not None and slow.ttft_p50_ms > 1000
    later = [sample(curves, float(second), ttft=(0, 0, 4, 0)) for second in range(2, 2 * int(WINDOW_S))]
    assert later[-1].ttft_p50_ms is None
    fast = sample(curves, 2 * WINDOW_S, ttft=(3, 0, 4, 0))
    assert fast.ttft_p50_ms == 50.0


def test_points_are_bounded() -> None:
    curves = Curves()
    for second in range(KEEP_POINTS + 50):
        sample(curves, float(second))
    assert len(curves.points) == KEEP_POINTS and curves.points[-1].at == 1000 + KEEP_POINTS + 49


def test_acceptance_adds_up_over_workers_that_come_go_and_begin_anew() -> None:
    acceptance = Acceptance()
    acceptance.observe([presence("decode", 1, draft_tokens=100, accepted_tokens=90)])
    assert (acceptance.draft_tokens, acceptance.accepted_tokens) == (0, 0), "what was before is not of these minutes"
    acceptance.observe([presence("decode", 1, draft_tokens=110, accepted_tokens=95), presence("decode", 2)])
    acceptance.observe([presence("decode", 2, draft_tokens=4, accepted_tokens=1)])
    assert (acceptance.draft_tokens, acceptance.accepted_tokens) == (14, 6)
    acceptance.observe([presence("decode", 2)])
    assert (acceptance.draft_tokens, acceptance.accepted_tokens) == (14, 6), "counters that fell give nothing back"


def test_histograms_of_several_models_are_one() -> None:
    assert added([(1, 2, 3), (10, 20, 30)]) == (11, 22, 33)
    assert added([]) == ()
