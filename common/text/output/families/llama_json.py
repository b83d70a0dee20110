"""Llama 3.1, 3.2 and 3.3: `{"name": "f", "parameters": {"x": 1}}` and nothing else, at times behind `<|python_tag|>`; several
calls stand behind each other, or are parted by semicolons.

No mark tells a call from other JSON, so it must begin a line, and name a tool of the request.

Source: Llama 3.1's model card ("JSON based tool calling") and its chat template.
"""

from __future__ import annotations

from common.text.output.json_calls import object_call
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

TAG = "<|python_tag|>"
_LINE_OR_TAG = Markers("\n", TAG)
_NOTHING = Markers("\0")


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    while True:
        yield from _line(scan, sink, tools)
        marker = yield from scan.until(_LINE_OR_TAG, sink.text)
        if not marker:
            return
        if marker == "\n":
            sink.text(marker)


def _line(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    """Read the calls that begin a line, if there are any."""
    scan.keep()
    yield from scan.accept(TAG)
    while (yield from scan.skip_space()) == "{":
        outcome = yield from object_call(scan, sink, tools, known=True)
        if outcome == "none":
            return
        if outcome == "open":
            yield from scan.until(_NOTHING, sink.arguments)
            sink.end()
            return
        scan.keep()
        if (yield from scan.skip_space()) == ";":
            scan.take(scan.at + 1)
    sink.text(scan.kept())
