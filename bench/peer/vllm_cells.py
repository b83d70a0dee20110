"""vLLM on dummy weights, token ids in and out: the cells of `bench.engine`, measured in the same way, a JSON line per result.

Runs in a process of its own, with vLLM's folder first on PYTHONPATH (see README.md): `python -m bench.peer.vllm_cells
--folder FOLDER --precision bf16 --cells decode,prefill`, where FOLDER holds a config.json. Started by `bench.engine --peer`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.stats import Percentiles
from bench.engine import gate
from bench.engine.cells import Cell, Failed, FirstToken, Measured, Opened, encode_line, parse_cells
from common.runtime import parent_death

PRECISIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "bf16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8-weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled at start, by a compiler that may not be there
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MIN_CONTEXT = 16384
_CODES = ("qweight", "qzeros", "weight_packed")
"""Tensors of codes, of which any bits are right."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peer.vllm_cells", description=__doc__)
    parser.add_argument("--folder", required=True, help="holds the model's config.json")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    parser.add_argument("--cells", type=parse_cells, required=True)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--first-token-prompt", type=int, default=128)
    parser.add_argument("--first-token-count", type=int, default=15)
    parser.add_argument("--kv-gb", type=float, default=0.0, help="GiB of KV; 0: what nine tenths of the card's memory leave")
    parser.add_argument("--weights", action="store_true", help="the folder has weights; without, random ones")
    parser.add_argument("--draft", default="", help="folder of a draft model; in both folders are weights then")
    parser.add_argument("--draft-tokens", type=int, default=4, help="that the draft model proposes")
    parser.add_argument("--gate", type=Path, help="a file to wait for before cells are measured (bench/engine/gate.py)")
    return parser.parse_args(argv)


def draw_codes() -> None:
    """Make vLLM draw 32-bit words of codes, too, in this process and those forked from it.

    Its dummy weights leave them as memory was, mostly zeros: AWQ's products would be of equal numbers, for which a card at its
    power limit clocks higher than for any model."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader  # pyright: ignore[reportMissingImports]

    plain: Any = dummy_loader.initialize_single_dummy_weight

    def initialize(tensor: Any, *given: Any, **named: Any) -> None:
        plain(tensor, *given, **named)
        if tensor.dtype == torch.int32 and str(named.get("name", "")).endswith(_CODES):
            tensor.data.view(torch.uint8).random_(0, 256)

    dummy_loader.initialize_single_dummy_weight = initialize


def context_of(cell: Cell) -> int:
    """Tokens of the longest sequence, with some to spare."""
    return max(cell.lengths()) + cell.out + 16


class Peer:
    def __init__(self, options: argparse.Namespace) -> None:
        import vllm  # pyright: ignore[reportMissingImports]

        self._sampling: Any = vllm.SamplingParams
        config: dict[str, Any] = json.loads((Path(options.folder) / "config.json").read_text())
        self.max_context: int = config["max_position_embeddings"]
        self._vocab: int = config["vocab_size"]
        longest = max([needed for cell in options.cells if (needed := context_of(cell)) <= self.max_context], default=0)
        self.version: str = vllm.__version__
        # given the KV's size it looks at this share only to see that so much is free
        memory: dict[str, Any] = {"gpu_memory_utilization": 0.9}
        if options.kv_gb:
            memory = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": int(options.kv_gb * (1 << 30))}
        if not (options.weights or options.draft):
            draw_codes()
        drafts = None
        if options.draft:
            drafts = {"model": options.draft, "method": "draft_model", "num_speculative_tokens": options.draft_tokens}
        self._llm: Any = vllm.LLM(
            model=options.folder,
            load_format="auto" if options.weights or options.draft else "dummy",
            speculative_config=drafts,
            skip_tokenizer_init=True,
            max_model_len=min(self.max_context, max(MIN_CONTEXT, longest)),
            enable_prefix_caching=False,
            max_num_seqs=options.max_rows,
            max_num_batched_tokens=options.token_budget,
            disable_log_stats=True,
            **memory,
            **PRECISIONS[options.precision],
        )
        self._random = random.Random(0)

    def seconds(self, lengths: Sequence[int], out: int) -> float:
        prompts = [{"prompt_token_ids": [self._random.randrange(10, self._vocab) for _ in range(n)]} for n in lengths]
        # without min_tokens, which masks logits in every step: nothing else ends an answer
        sampling = self._sampling(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert all(len(answer.outputs[0].token_ids) == out for answer in answers)
        return seconds

    def cell(self, cell: Cell, repeat: int) -> Measured:
        """:raises ValueError: if the model's context is too short for it."""
        if context_of(cell) > self.max_context:
            raise ValueError(f"the model holds {self.max_context} tokens")
        lengths = cell.lengths()
        self.seconds(lengths, min(cell.out, 8))  # as ours: shapes that this cell is the first to need
        if cell.out == 1:
            first_s = min(self.seconds(lengths, 1) for _ in range(repeat + 1))
            return Measured(cell=str(cell), first_s=first_s, total_s=first_s, tok_s=sum(lengths) / first_s)
        total_s = min(self.seconds(lengths, cell.out) for _ in range(repeat))
        # behind the whole runs: it goes on compiling for some calls, and what is subtracted must not hold that
        first_s = min(self.seconds(lengths, 1) for _ in range(repeat + 1))
        tokens, measured_s = cell.rows * (cell.out - 1), total_s - first_s
        return Measured(cell=str(cell), first_s=first_s, total_s=total_s, tok_s=tokens / measured_s if measured_s > 0 else 0.0)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: Opened | Measured | FirstToken | Failed) -> None:
        results.write(encode_line(line) + "\n")

    begun = time.perf_counter()
    peer = Peer(options)
    loaded_s = time.perf_counter() - begun
    peer.seconds([64], 2)
    first_token_s = time.perf_counter() - begun
    say(
        Opened(name="vLLM", device="", version=f"vLLM {peer.version}", load_s=loaded_s, first_token_s=first_token_s, ahead=True)
    )
    peer.seconds([64] * 4, 8)
    peer.seconds([64] * min(256, options.max_rows), 8)
    if options.gate:
        gate.arrive(options.gate)
        gate.wait(options.gate)
    times = [peer.seconds([options.first_token_prompt], 1) for _ in range(options.first_token_count)]
    say(FirstToken(prompt=options.first_token_prompt, ms=Percentiles.of_seconds(times), count=len(times)))
    for cell in options.cells:
        try:
            say(peer.cell(cell, options.repeat))
        except Exception as error:  # whatever it raises is what there is to say of this cell
            say(Failed(cell=str(cell), error=f"{type(error).__name__}: {str(error)[:300]}"))
    return 0


def end_all(*_: object) -> None:
    """vLLM's engine is a process of its own, which would keep the card."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, end_all)
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
