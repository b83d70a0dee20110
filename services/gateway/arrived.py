"""An output of a core that is turned into text in slices, so that others get their turn between them. Pure."""

from __future__ import annotations

from services.gateway.transcript import Output


class Arrived:
    """An output of which the first `taken` tokens have been turned into text."""

    def __init__(self, index: int, output: Output) -> None:
        self.index = index
        self.output = output
        self.taken = 0

    def take(self, count: int) -> Output:
        """The next `count` tokens; the last ones come with how the output ends."""
        output, start = self.output, self.taken
        if start == 0 and len(output.tokens) <= count:
            self.taken = len(output.tokens)
            return output
        self.taken = end = min(start + count, len(output.tokens))
        scores = None if output.logprobs is None else output.logprobs[start:end]
        part = Output(output.tokens[start:end], scores, cached_tokens=output.cached_tokens, of_prompt=output.of_prompt)
        if self.is_done:
            part.finish, part.error = output.finish, output.error
        return part

    @property
    def is_done(self) -> bool:
        return self.taken >= len(self.output.tokens)
