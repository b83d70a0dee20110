"""What a worker with an engine counts, under the names that vLLM's dashboards graph where there is one.

A `vllm:…` name has one meaning in all of Penstock: what is of an engine (its cache, its drafts, its preemptions) is a worker's,
what is of whole requests is a gateway's (`services/gateway/metrics.py`). A worker's sequences and tokens have names
of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter

from common.cache.usage import fullest, used_share
from common.engine.plan import StepPlan
from common.protocol.messages import KvUsage
from common.runtime.metrics import MODEL_LABEL, Metrics
from common.worker.kv_blocks import KvBlocks

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class EngineMetrics:
    def __init__(
        self,
        metrics: Metrics,
        *,
        model: str,
        usage: Callable[[], KvUsage],
        running: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:
        """`model`: its name for clients."""

        def of_engine(name: str, description: str) -> Counter:
            return metrics.counter(name, description, [MODEL_LABEL]).labels(model)

        def read(name: str, description: str, value: Callable[[], float]) -> None:
            metrics.gauge(name, description, [MODEL_LABEL]).labels(model).set_function(value)

        self.prompt_tokens = of_engine("engine_prompt_tokens_total", "Prompt tokens computed (cached ones left out)")
        self.generation_tokens = of_engine("engine_generation_tokens_total", "Tokens sampled and kept")
        self.prefix_queries = of_engine("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = of_engine("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
        self.drafts = of_engine("vllm:spec_decode_num_drafts_total", "Proposals verified")
        self.draft_tokens = of_engine("vllm:spec_decode_num_draft_tokens_total", "Proposed tokens verified")
        self.accepted_tokens = of_engine("vllm:spec_decode_num_accepted_tokens_total", "Proposed tokens accepted")
        self.preemptions = of_engine("vllm:num_preemptions_total", "Sequences sent back to wait for blocks")
        steps = metrics.histogram("engine_step_seconds", "Time of one engine step", STEP_BUCKETS_S, [MODEL_LABEL])
        self.step_seconds = steps.labels(model)
        self.invalid_logits = of_engine(
            "engine_invalid_logits_total", "Requests that failed since their logits were not finite"
        )
        self.step_failures = of_engine("engine_step_failures_total", "Engine steps that raised an error")
        read("engine_sequences_running", "Sequences in the running batch", lambda: float(running()))
        read("engine_sequences_waiting", "Sequences taken but not running", lambda: float(waiting()))
        read("vllm:kv_cache_usage_perc", "Share of KV blocks owned or leased, 0 to 1", lambda: used_share(fullest(usage())))
        metrics.registry.register(KvBlocks(model, usage))

    def step(self, plan: StepPlan, elapsed_s: float) -> None:
        self.step_seconds.observe(elapsed_s)
        prompt_tokens = sum(len(row.tokens) for row in plan.rows if len(row.tokens) > row.num_samples)
        if prompt_tokens:
            self.prompt_tokens.inc(prompt_tokens)
