"""What the CPU engine is compared with, each in its own process: `python -m bench.cpu.peers transformers '<Work as JSON>'`.

Both generate greedily from the prompts of `Work`. The rate, on stdout, is that of decoding alone: a long answer's time less a
short one's, so that the prompt's is not in it. llama.cpp comes from the PyPI package xllamacpp; without it there is no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from bench.common.request import request


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """prompts: one per stream. model: the GGUF file."""

    model: str
    prompts: list[str]
    tokens: int
    threads: int


def decode_rate(generate: Callable[[int], Any], rows: int, tokens: int) -> float:
    """Tokens per second. `generate(n)` makes n tokens of each row."""
    generate(2)
    took: list[float] = []
    for count in (1, tokens + 1):
        began = time.perf_counter()
        generate(count)
        took.append(time.perf_counter() - began)
    return rows * tokens / (took[1] - took[0])


def transformers_rate(work: Work) -> float:
    """bfloat16, KV cache, all rows in one batch."""
    from pathlib import Path

    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(work.threads)
    path = Path(work.model)
    files: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **files)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **files).eval()
    inputs = tokenizer(work.prompts, return_tensors="pt", padding=True)

    def generate(count: int) -> None:
        with torch.inference_mode():
            model.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )

    return decode_rate(generate, len(work.prompts), work.tokens)


def llama_cpp_rate(work: Work) -> float:
    """The file's own quantisation; one slot per row, batched by its server."""
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    rows = len(work.prompts)
    params: Any = xllamacpp.CommonParams()
    params.model.path = work.model
    params.n_ctx = 1024 * rows
    params.n_parallel = rows
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work.threads
    params.verbosity = -1
    server: Any = xllamacpp.Server(params)

    def one(prompt: str, count: int) -> None:
        request = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(request)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(str(answer["error"]))

    with ThreadPoolExecutor(rows) as pool:
        return decode_rate(lambda count: list(pool.map(lambda prompt: one(prompt, count), work.prompts)), rows, work.tokens)


PEERS: dict[str, Callable[[Work], float]] = {"transformers": transformers_rate, "llama.cpp": llama_cpp_rate}


if __name__ == "__main__":
    given, work = request(Work, "bench.cpu.peers", __doc__, peer=PEERS)
    print(PEERS[given.peer](work))
