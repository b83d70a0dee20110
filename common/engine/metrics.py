"""What a worker with an engine counts, under the names that vLLM's dashboards graph."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.plan import StepPlan
from common.protocol.messages import KvUsage
from common.runtime.metrics import Metrics

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class EngineMetrics:
    def __init__(
        self, metrics: Metrics, *, usage: Callable[[], KvUsage], running: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens_total", "Prompt tokens computed (cached ones left out)")
        self.generation_tokens = metrics.counter("vllm:generation_tokens_total", "Tokens sampled and kept")
        self.prefix_queries = metrics.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = metrics.counter("vllm:prefix_cache_hits_total", "Prompt tokens found there")
        self.drafts = metrics.counter("vllm:spec_decode_num_drafts_total", "Proposals verified")
        self.draft_tokens = metrics.counter("vllm:spec_decode_num_draft_tokens_total", "Proposed tokens verified")
        self.accepted_tokens = metrics.counter("vllm:spec_decode_num_accepted_tokens_total", "Proposed tokens accepted")
        self.preemptions = metrics.counter("vllm:num_preemptions_total", "Sequences sent back to wait for blocks")
        self.step_seconds = metrics.histogram("engine_step_seconds", "Time of one engine step", STEP_BUCKETS_S)
        self.step_failures = metrics.counter("engine_step_failures_total", "Steps that raised")
        metrics.gauge("vllm:num_requests_running", "Sequences in the running batch", read=lambda: float(running()))
        metrics.gauge("vllm:num_requests_waiting", "Sequences taken but not running", read=lambda: float(waiting()))
        metrics.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks owned or leased, 0 to 1", read=lambda: _share(usage()))
        blocks = metrics.gauge("kv_blocks", "KV blocks by state; they add up to the pool", ["state"])
        for state in ("free", "owned", "leased", "cached"):
            blocks.labels(state).set_function(lambda state=state: float(getattr(usage(), state)))

    def step(self, plan: StepPlan, elapsed_s: float) -> None:
        self.step_seconds.observe(elapsed_s)
        prompt_tokens = sum(len(row.tokens) for row in plan.rows if len(row.tokens) > row.num_samples)
        if prompt_tokens:
            self.prompt_tokens.inc(prompt_tokens)


def _share(usage: KvUsage) -> float:
    return (usage.owned + usage.leased) / usage.total if usage.total else 0.0
