"""What transformers says the answer is: the tokens a request must get, whatever the pipeline did to it.

Generating with transformers costs seconds per request, so the answer that was given is used as a guess: one pass over prompt
and guess tells what the model would have chosen at each place. The first place where that differs is the first wrong token;
from there on the true tokens are found one by one. So a guess changes how long this takes and never what comes out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from common.engine.plan import StepRow
from common.engine.sampling import sample_rows
from common.protocol.messages import SamplingParams
from common.text.detokenize import Detokenizer
from common.text.tokenizer import Tokenizer


@dataclass
class Case:
    """A request and what is asked of it. `sampling`: the body's arguments; greedy when empty."""

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0, **self.sampling}


class Oracle:
    """`model`: of transformers, in float32. Thread-safe."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._known: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()

    def text(self, case: Case, guess: str = "") -> str:
        """The text that `case` must give. `guess`: the text it gave."""
        return self._text(self.tokens(case, guess))

    def tokens(self, case: Case, guess: str = "") -> list[int]:
        """The tokens that `case` must give."""
        key = msgspec.msgpack.encode((case.prompt, case.sampling))
        with self._lock:
            known = self._known.get(key, [])
            if len(known) < case.max_tokens:
                known = self._known[key] = self._extend(case, known, guess)
        return known[: case.max_tokens]

    def _extend(self, case: Case, known: list[int], guess: str) -> list[int]:
        """`known`, made as long as is asked for."""
        while len(known) < case.max_tokens:
            text = self._text(known)
            tail = self.tokenizer.encode(guess[len(text) :]) if guess.startswith(text) else []
            tail = tail[: case.max_tokens - len(known) - 1]
            chosen = self._chosen(case, known, tail)
            agreed = next((i for i, token in enumerate(tail) if token != chosen[i]), len(tail))
            known = known + chosen[: agreed + 1]
        return known

    def _text(self, tokens: list[int]) -> str:
        detokenizer = Detokenizer(self.tokenizer, continues=True)
        return detokenizer.push(tokens) + detokenizer.finish()

    @torch.no_grad()
    def _chosen(self, case: Case, known: list[int], guess: list[int]) -> list[int]:
        """What comes behind `known`, and behind each token of `guess` if all before it were right: len(guess) + 1 tokens."""
        tokens = case.prompt + known + guess
        count = len(guess) + 1
        logits = self.model(torch.tensor([tokens]), use_cache=False, logits_to_keep=count).logits[0]
        if not case.sampling.get("temperature"):
            return logits.argmax(-1).tolist()
        params = msgspec.convert(case.sampling, SamplingParams, strict=False)
        row = StepRow(
            tokens=tokens,
            start=0,
            blocks=[],
            num_samples=count,
            sampling=params,
            prompt_tokens=len(case.prompt),
            history=tokens,
        )
        return sample_rows(logits, [row])[0].tokens
