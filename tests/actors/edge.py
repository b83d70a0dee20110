"""What the edges' tests stand on: a small real text bundle, a core that plays a script, and a client at the ASGI level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.models.source import ModelFiles
from common.protocol.errors import Cancelled, Overloaded, PenstockError, ShuttingDown
from common.protocol.handles import WorkerRef
from common.protocol.messages import TokenLogprobs
from common.runtime.bus import Bus
from common.runtime.metrics import Metrics
from common.runtime.tracing import OFF
from common.text.bundle import TextBundle
from common.text.template import ChatTemplate
from common.text.tokenizer import Tokenizer
from services.gateway.answer import OfferedCore
from services.gateway.catalog import Catalog
from services.gateway.config import GatewayConfig
from services.gateway.door import Door
from services.gateway.http import create_app
from services.gateway.intake import Intake
from services.gateway.nats_front import NatsFront
from services.gateway.requests import GenerationRequest, Output
from tests.waiting import until

MAX_CONTEXT = 512
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"


def small_bundle() -> TextBundle:
    """A byte-level tokenizer without merges (a token is a byte), one end-of-text token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    eos = backend.token_to_id("<|end|>")
    assert eos is not None
    return TextBundle(
        name="Small/Model-1",
        files=ModelFiles(name="Small/Model-1", format="gguf", path=Path("none")),
        tokenizer=Tokenizer(backend, eos_ids=[eos]),
        template=ChatTemplate(TEMPLATE),
        eos_ids=[eos],
        max_context=MAX_CONTEXT,
    )


def app_of(
    core: OfferedCore, config: GatewayConfig, *, bundle: TextBundle | None = None, intake: Intake | None = None
) -> ASGIApp:
    """The HTTP edge of a gateway with one model."""
    return create_app(core, Catalog.of_one(core, bundle or BUNDLE, config, intake), config)


def front_of(core: OfferedCore, bus: Bus, config: GatewayConfig, *, bundle: TextBundle | None = None) -> NatsFront:
    """The NATS edge of a gateway with one model."""
    return NatsFront(core, Catalog.of_one(core, bundle or BUNDLE, config), bus, config, Door(config))


BUNDLE = small_bundle()
EOS = BUNDLE.eos_ids[0]


def ids(text: str) -> list[int]:
    return BUNDLE.tokenizer.encode(text)


class ScriptedStream:
    """A stream that the test feeds. Outputs that wait are handed out together, as the real one does."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.cancelled = 0
        self.taken = 0
        self._waiting = Output([])
        self._ended = False
        self._news = anyio.Event()

    def say(self, text: str = "", *, finish: Any = None, error: PenstockError | None = None, cached: int = 0) -> None:
        self.give(ids(text), finish=finish, error=error, cached=cached)

    def give(self, tokens: list[int], *, finish: Any = None, error: PenstockError | None = None, cached: int = 0) -> None:
        waiting = self._waiting
        waiting.tokens += tokens
        if self.request.sampling.logprobs >= 0:
            likeliest = tuple(range(self.request.sampling.logprobs))
            new = [TokenLogprobs(-0.25, likeliest, tuple(-1.0 - rank for rank in likeliest)) for _ in tokens]
            waiting.logprobs = [*(waiting.logprobs or []), *new]
        waiting.finish = waiting.finish or finish
        waiting.error = waiting.error or error
        waiting.cached_tokens = max(waiting.cached_tokens, cached)
        self._news.set()

    async def next(self) -> Output:
        await self._news.wait()
        output, self._waiting = self._waiting, Output([])
        self._ended = output.finish is not None or output.error is not None
        if not self._ended:
            self._news = anyio.Event()
        self.taken += len(output.tokens)
        return output

    def cancel(self) -> None:
        self.cancelled += 1
        if not self._ended and self._waiting.finish is None and self._waiting.error is None:
            self.give([], error=Cancelled("the request was cancelled"))


class ScriptedCore:
    """`script` is called with every new stream, and may feed it at once. `live` are the streams that nobody cancelled."""

    def __init__(self, script: Callable[[ScriptedStream], None] | None = None, *, capacity: int = 1000) -> None:
        self.ref = WorkerRef("gateway", "gateway-1", 1)
        self.metrics = Metrics(role="gateway")
        self.tracing = OFF
        self.ready, self.obstacle, self.longest, self.longest_read = True, "", 0, 0
        self.draining = False
        self.capacity = capacity
        self.streams: list[ScriptedStream] = []
        self._script = script

    def generate(self, request: GenerationRequest) -> ScriptedStream:
        if self.draining:
            raise ShuttingDown("the gateway is shutting down")
        if len(self.live) >= self.capacity:
            raise Overloaded("the queue is full")
        assert request.id not in [stream.request.id for stream in self.live]
        stream = ScriptedStream(request)
        self.streams.append(stream)
        if self._script is not None:
            self._script(stream)
        return stream

    @property
    def live(self) -> list[ScriptedStream]:
        return [stream for stream in self.streams if not stream.cancelled]

    async def nth(self, index: int) -> ScriptedStream:
        """Stream number `index`, as soon as there is one."""
        await until(lambda: len(self.streams) > index)
        return self.streams[index]


class AsgiClient:
    """One HTTP request at the ASGI level: the test sees every write, and may stall or hang up."""

    def __init__(self, app: ASGIApp, path: str, body: Any, *, headers: dict[str, str] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.done = False
        self.reading = anyio.Event()
        self.reading.set()
        self._app = app
        self._gone = anyio.Event()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._parts = [raw[at : at + 1000] for at in range(0, len(raw), 1000)] or [b""]
        fields = {"content-type": "application/json"} | (headers or {})
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        }
        self.parts_read = 0

    async def run(self) -> None:
        await self._app(self.scope, self._receive, self._send)
        self.done = True

    def hang_up(self) -> None:
        self._gone.set()
        self.reading.set()

    def stall(self) -> None:
        self.reading = anyio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def events(self) -> list[Any]:
        """The stream's events so far: JSON, or the string [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]

    @property
    def text(self) -> str:
        choices = [choice for event in self.events if isinstance(event, dict) for choice in event.get("choices", [])]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    async def _receive(self) -> dict[str, Any]:
        if self.parts_read < len(self._parts):
            self.parts_read += 1
            body = self._parts[self.parts_read - 1]
            return {"type": "http.request", "body": body, "more_body": self.parts_read < len(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.writes.append(message["body"])
