"""What a streamed answer consists of, as the commands read it: OpenAI's chat chunks, and the `Answer` that they add up to.

Fields that no command needs are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of the tool call number `index`: its id and name come first, the text of its arguments in pieces."""

    index: int = 0
    id: str = ""
    function: FunctionDelta = FunctionDelta()


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: Delta = Delta()
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class Chunk(msgspec.Struct, frozen=True):
    """One message of a streamed chat."""

    id: str = ""
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def reasoning(self) -> str:
        return "".join(choice.delta.reasoning_content or "" for choice in self.choices)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        return [call for choice in self.choices for call in choice.delta.tool_calls or ()]

    @property
    def says_something(self) -> bool:
        """Whether it brings a piece of the answer: text, reasoning or a tool call."""
        return bool(self.text or self.reasoning or self.tool_calls)


class Timing(msgspec.Struct):
    """Monotonic seconds. `tokens` is the server's count, 0 until the last chunk told it."""

    started: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def saw_text(self, now: float) -> None:
        self.first = self.first or now
        self.last = now

    @property
    def ttft_s(self) -> float:
        return max(0.0, self.first - self.started)

    @property
    def itl_s(self) -> float:
        """Mean time between tokens after the first; 0 when there were fewer than two."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first."""
        return 1 / self.itl_s if self.itl_s > 0 else 0.0

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1000:.0f} ms · {self.tokens_per_s:.1f} tok/s · {self.tokens} tokens"


class Answer(msgspec.Struct):
    """One answer, as far as its chunks have come. `calls`: its tool calls as OpenAI writes them, by index."""

    id: str = ""
    model: str = ""
    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = {}
    finish_reason: str | None = None
    usage: Usage = Usage()
    timing: Timing = msgspec.field(default_factory=lambda: Timing(0.0))

    def add(self, chunk: Chunk) -> None:
        self.id = self.id or chunk.id
        self.model = self.model or chunk.model
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls:
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = self.calls.setdefault(piece.index, empty)
            call["id"] = call["id"] or piece.id
            call["function"]["name"] += piece.function.name
            call["function"]["arguments"] += piece.function.arguments
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return [self.calls[index] for index in sorted(self.calls)]

    def summary(self) -> dict[str, Any]:
        """The answer with named fields and units, for `--json`. A time that could not be measured is null."""
        timing = self.timing
        return {
            "id": self.id,
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": self.tool_calls,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
            "ttft_s": round(timing.ttft_s, 6) if timing.first else None,
            "duration_s": round(timing.last - timing.started, 6) if timing.first else None,
            "tokens_per_s": round(timing.tokens_per_s, 3) or None,
        }
