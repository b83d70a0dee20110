"""What flags of vLLM, SGLang and llama.cpp are called here, so that an unknown one is answered with its name or a reason."""

from __future__ import annotations

from collections.abc import Container

NAMES = {
    "--host": "--http-host",
    "--port": "--http-port",
    "--model-path": "--model",
    "--hf-repo": "--model",
    "--alias": "--served-model-name",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--parallel": "--max-running",
    "--max-queued-requests": "--max-queue",
    "--max-num-batched-tokens": "--token-budget",
    "--chunked-prefill-size": "--token-budget",
    "--block-size": "--block-tokens",
    "--page-size": "--block-tokens",
    "--num-gpu-blocks-override": "--num-blocks",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-mb",
    "--cache-type-k": "--kv-cache-dtype",
    "--tool-call-parser": "--tool-parser",
    "--speculative-model": "--draft-model",
    "--speculative-draft-model-path": "--draft-model",
    "--model-draft": "--draft-model",
    "--num-speculative-tokens": "--speculation-tokens",
    "--speculative-num-draft-tokens": "--speculation-tokens",
    "--draft-max": "--speculation-tokens",
    "--disaggregation-transfer-backend": "--kv-transfer",
}
"""By their names there."""
ALWAYS = frozenset(
    {
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "--enable-auto-tool-choice",
        "--enable-metrics",
        "--metrics",
        "--cont-batching",
        "--jinja",
    }
)
"""What cannot be turned off here."""
_ONE_GPU = "a model is on one GPU; --decode and --prefill say how many workers have it"
REASONS = {
    "--trust-remote-code": "code that comes with a model is never run",
    "--tensor-parallel-size": _ONE_GPU,
    "--tp-size": _ONE_GPU,
    "--tp": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU,
    "--data-parallel-size": "--decode and --prefill say how many workers have the model",
}
"""Why there is no such flag."""


def advice(flag: str, known: Container[str]) -> str:
    """Return what to give in place of a flag of another server, if that is one of the flags `known` here; else nothing."""
    if (name := NAMES.get(flag, "")) and name in known:
        return f"here it is {name}"
    if flag in ALWAYS:
        return "that is always so here: leave it out"
    return REASONS.get(flag, "")
