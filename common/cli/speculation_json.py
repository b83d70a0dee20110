"""What speculation gave during a load, for `penstock bench --speculation --json`. Shares and means of nothing are null."""

from __future__ import annotations

from typing import Any

from common.cli.speculation_report import DecodeWorker, Drafter, DraftWorker, Speculation, mean_round_trip_s, share


def speculation_summary(found: Speculation) -> dict[str, Any]:
    """Return the value of `speculation` in the JSON; docs/cli.md describes each field."""
    return {
        "decode_workers": [_decode_worker(worker) for worker in found.decode],
        "draft_workers": [_draft_worker(worker) for worker in found.draft],
        "unread_workers": found.unread,
    }


def _decode_worker(worker: DecodeWorker) -> dict[str, Any]:
    count = worker.speculation
    received, late, hits, misses = map(count, ("received_proposals", "late_proposals", "table_hits", "table_misses"))
    step_s = worker.total("penstock_engine_step_seconds_sum")
    return {
        "model": worker.model,
        "worker": worker.worker,
        "generated_tokens": round(worker.generated),
        "tokens_per_step": _rounded(share(worker.generated, count("sequence_steps"))),
        "steps_saved": round(worker.accepted),
        "steps_saved_share": _rounded(share(worker.accepted, worker.generated)),
        "drafters": {name: _drafter(one) for name, one in worker.drafters.items()},
        "draft_worker_proposals": {
            "received": round(received),
            "late": round(late),
            "late_share": _rounded(share(late, received)),
            "mean_lateness_ms": _ms(share(count("lateness_seconds"), late)),
            "mean_round_trip_ms": _ms(mean_round_trip_s(worker)),
        },
        "outcome_tables": {"hits": round(hits), "misses": round(misses), "hit_share": _rounded(share(hits, hits + misses))},
        "probing": {
            "engine_steps": round(worker.engine_steps),
            "steps_without_proposals": round(count("probe_steps")),
            "trial_steps": round(count("trial_steps")),
            "quiet_steps": round(count("quiet_steps")),
            "head_probes": round(count("head_probes")),
        },
        "head": {
            "drafted_tokens": round(count("head_tokens")),
            "time_s": round(count("head_seconds"), 6),
            "share_of_step_time": _rounded(share(count("head_seconds"), step_s)),
        },
    }


def _drafter(one: Drafter) -> dict[str, Any]:
    return {
        "proposals": round(one.drafts),
        "verified_tokens": round(one.verified),
        "accepted_tokens": round(one.accepted),
        "acceptance": _rounded(share(one.accepted, one.verified)),
        "accepted_of_a_proposal": _rounded(share(one.accepted, one.drafts)),
        "acceptance_by_position": [round(accepted, 4) for accepted in one.acceptance],
    }


def _draft_worker(worker: DraftWorker) -> dict[str, Any]:
    return {
        "worker": worker.worker,
        "model": worker.model,
        "busy_share": round(worker.busy_share, 4),
        "busy_s": round(worker.draft("busy_seconds"), 6),
        "proposals": round(worker.draft("proposals")),
        "proposed_tokens": round(worker.draft("proposed_tokens")),
        "drafted_tokens": round(worker.draft("model_tokens")),
        "drafted_in_vain": round(worker.draft("model_tokens_in_vain")),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
