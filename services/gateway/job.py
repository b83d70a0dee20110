"""A job: what has to be generated for a request, and who encodes the answer. Pure.

Views make the writers (`views/view.py`); `prepare` makes jobs of their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from common.protocol.errors import PenstockError
from common.protocol.messages import MAX_PREDICTION_TOKENS, SamplingParams
from services.gateway.bodies import Heading, Kind, Usage
from services.gateway.choice_events import AnswerFormat
from services.gateway.choices import Delta, StopStrings
from services.gateway.logprobs import TokenNames
from services.gateway.whole import Pieces

_BEFORE_PREDICTION = 8
"""Tokens of the prompt's end that are looked up with a prediction: most often what a chat template begins answers with."""


class StreamWriter(Protocol):
    """Encodes one streamed answer. Over SSE, what a method returns is written as it is; over NATS, each piece is a message.

    A piece goes out for (nearly) every token, so all of it but the new text should be encoded beforehand.
    """

    @property
    def size(self) -> int:
        """Bytes of the answer that are kept until its end."""
        ...

    def opening(self) -> list[bytes]:
        """What comes before the first delta. Asked for when that has arrived."""
        ...

    def delta(self, index: int, delta: Delta, /) -> list[bytes]:
        """A delta of choice `index`; nothing to tell, nothing returned."""
        ...

    def ending(self, index: int, delta: Delta, /) -> list[bytes]:
        """The answer's last delta, and the end."""
        ...

    def failure(self, error: PenstockError, /) -> bytes:
        """The end of a stream that fails, over SSE. Nothing may have gone out but the opening and deltas."""
        ...


class WholeWriter(Protocol):
    """Puts an answer that is not streamed together, delta by delta. `size`: bytes so far, but for a few."""

    size: int

    def add(self, index: int, delta: Delta, /) -> None: ...

    def finish(self, usage: Usage, /) -> Pieces:
        """The body; nothing can be added any more."""
        ...


class Writers(Protocol):
    """Makes what encodes the answer to one request."""

    def stream(self, job: Job, names: TokenNames, usage: Callable[[], Usage], *, sse: bool) -> StreamWriter:
        """`usage` tells that of the answer so far."""
        ...

    def whole(self, job: Job, names: TokenNames) -> WholeWriter: ...


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. `id` names it inside, `shown_id` to the client. Choice number c of prompt p has index p * n + c.

    `sampling.seed` is the first choice's (see `choices.choice_seed`). `echoes[p]` is sent before the text of prompt p's
    choices. `top_logprobs`: -1 none, else how many alternatives each token lists. `usage_so_far`: every chunk of the stream
    tells the usage up to it. `salt` keeps the prompt's KV apart. `warning`: what of the request had no effect. `format`: how
    answers are read that may be more than text. `echo_top`, `prompt_top`: how many alternatives the prompt's tokens list in the
    answer's log-probabilities and in `prompt_logprobs`, -1: they are not there. `continues`: an answer follows text or has a
    form, so a leading space is kept. `writers`: what encodes the answer. `tenant`: who asked, empty for nobody in
    particular; `weight`: its share of workers. `prediction`: tokens that the answers are expected to repeat in parts.
    `fills_context`: an answer that is cut off is cut off by the end of the context, not by what the client asked for.
    """

    id: str
    shown_id: str
    kind: Kind
    writers: Writers
    created: int
    model: str
    prompts: list[list[int]]
    echoes: list[str]
    n: int
    sampling: SamplingParams
    stops: StopStrings | None
    include_stop: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    usage_so_far: bool
    deadline_s: float
    skip_special: bool = True
    salt: bytes = b""
    warning: str = ""
    format: AnswerFormat | None = None
    continues: bool = False
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    background: bool = False
    echo_top: int = -1
    prompt_top: int = -1
    prediction: list[int] = []
    fills_context: bool = False

    def prediction_of(self, prompt: int) -> list[int]:
        """Return what is looked up beside a prompt: the prediction behind the prompt's end, so that an answer that begins like
        it is found at once."""
        looked_up = [*self.prompts[prompt][-_BEFORE_PREDICTION:], *self.prediction] if self.prediction else []
        return looked_up[:MAX_PREDICTION_TOKENS]

    @property
    def generates(self) -> bool:
        """Whether there is an answer behind the prompts."""
        return self.sampling.max_tokens > 0

    def prompt_top_of(self, choice: int) -> int:
        """How many alternatives the prompt's tokens list in this choice; -1: none are told. A chat tells them once."""
        return max(self.echo_top, self.prompt_top) if self.kind == "completion" or choice == 0 else -1

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def max_tokens_in_all(self) -> int:
        """Of all prompts and the longest answers that they may get."""
        return sum(map(len, self.prompts)) + self.num_choices * self.sampling.max_tokens

    @property
    def heading(self) -> Heading:
        return Heading(
            kind=self.kind,
            id=self.shown_id,
            created=self.created,
            model=self.model,
            num_choices=self.num_choices,
            top_logprobs=self.top_logprobs,
            prompt_top=self.prompt_top,
            may_call=self.format is not None and self.format.tools is not None,
        )

    def sampling_of(self, seed: int) -> SamplingParams:
        return self.sampling if seed == self.sampling.seed else msgspec.structs.replace(self.sampling, seed=seed)
