"""Reasoning between two marks before the answer: `<think>…</think>` of DeepSeek R1, Qwen3, GLM 4.5 and many others,
`[THINK]…[/THINK]` of Magistral.

Whether it is open as the answer begins is the prompt's to say: many templates write the first mark themselves, or both where
the request wants no reasoning.
"""

from __future__ import annotations

from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink


def read(scan: Scan, sink: Sink, opening: str, closing: str, *, is_open: bool) -> Reading[None]:
    """Deliver the reasoning that the answer begins with, if it does."""
    if not is_open:
        scan.keep()
        yield from scan.skip_space()
        is_open = yield from scan.accept(opening)
        space = scan.kept()
        if not is_open:
            sink.text(space)
            return
    sink.open_reasoning()
    yield from scan.until(Markers(closing), sink.reasoning)
    sink.close_reasoning()
