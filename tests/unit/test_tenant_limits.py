"""What a tenant may take: requests and tokens a minute, requests at a time; and that everything is given back."""

from __future__ import annotations

import pytest

from common.protocol.errors import Forbidden, RateLimited
from common.runtime.api_keys import TenantSettings
from services.gateway.tenants import Tenant, salt_of


def tenant(now: float = 0.0, **settings: float | tuple[str, ...]) -> Tenant:
    return Tenant("acme", TenantSettings(**settings), now)  # pyright: ignore[reportArgumentType]


def test_a_minutes_requests_come_at_once_and_then_one_by_one() -> None:
    acme = tenant(requests_per_minute=60)
    for _ in range(60):
        acme.enter(0.0).leave(0, 0.0)
    with pytest.raises(RateLimited) as refused:
        acme.enter(0.0)
    assert refused.value.http_status == 429 and refused.value.retry_after_s == pytest.approx(1.0)
    acme.enter(1.0)
    with pytest.raises(RateLimited):
        acme.enter(1.0)


def test_requests_at_a_time_end_when_they_leave_and_once_only() -> None:
    acme = tenant(max_concurrent=2)
    first, second = acme.enter(0.0), acme.enter(0.0)
    with pytest.raises(RateLimited):
        acme.enter(0.0)
    first.leave(0, 0.0)
    first.leave(0, 0.0)
    acme.enter(0.0)
    with pytest.raises(RateLimited):
        acme.enter(0.0)
    second.leave(0, 0.0)
    assert acme.num_running == 1


def test_a_refused_request_takes_nothing_of_the_minute() -> None:
    acme = tenant(max_concurrent=1, requests_per_minute=2)
    first = acme.enter(0.0)
    for _ in range(10):
        with pytest.raises(RateLimited):
            acme.enter(0.0)
    first.leave(0, 0.0)
    acme.enter(0.0)


def test_tokens_are_reserved_for_the_longest_answer_and_settled_for_the_real_one() -> None:
    acme = tenant(tokens_per_minute=600)
    first, second = acme.enter(0.0), acme.enter(0.0)
    first.reserve(400, 0.0)
    with pytest.raises(RateLimited) as refused:
        second.reserve(400, 0.0)
    assert refused.value.retry_after_s == pytest.approx(20.0)
    first.leave(100, 0.0)
    second.reserve(400, 0.0)
    second.leave(400, 0.0)
    third = acme.enter(0.0)
    third.reserve(100, 0.0)
    third.leave(0, 0.0)  # it failed before its first token
    acme.enter(0.0).reserve(100, 0.0)


def test_a_request_larger_than_a_minute_waits_for_a_full_bucket_and_its_rest_is_owed() -> None:
    acme = tenant(tokens_per_minute=600)
    large = acme.enter(0.0)
    large.reserve(10_000, 0.0)
    large.leave(1200, 0.0)  # twice what a minute holds
    with pytest.raises(RateLimited) as refused:
        acme.enter(0.0).reserve(1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(60.1)
    acme.enter(61.0).reserve(10, 61.0)


def test_changed_limits_hold_from_then_on_and_forget_nothing() -> None:
    acme = tenant(requests_per_minute=2)
    acme.enter(0.0)
    acme.enter(0.0)
    acme.change(TenantSettings(requests_per_minute=3), 0.0)
    acme.enter(0.0)
    with pytest.raises(RateLimited):
        acme.enter(0.0)
    acme.change(TenantSettings(), 0.0)
    for _ in range(100):
        acme.enter(0.0)


def test_a_tenant_may_be_kept_to_some_models() -> None:
    acme = tenant(models=("a", "b"))
    acme.check_model("a")
    with pytest.raises(Forbidden) as refused:
        acme.check_model("c")
    assert (refused.value.http_status, refused.value.param) == (403, "model")


def test_salts_of_tenants_and_of_requests_never_coincide() -> None:
    salts = [salt_of(tenant, salt) for tenant in ("", "a", "b", "ab") for salt in (None, "a", "b", "ab")]
    assert len(set(salts)) == len(salts)
    assert salt_of("", None) == b""
    assert salt_of("a", "b") == salt_of("a", "b")
