"""From a decoded embedding or score request to a `VectorJob`: token ids, checked against the model that is served."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio.to_thread
import msgspec

from common.protocol.errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter
from common.protocol.messages import Pooling
from common.text.bundle import TextBundle
from common.text.embedding_config import load_embedding_config
from services.gateway.arguments import Notes
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from services.gateway.prepare import deadline_of
from services.gateway.tenants import Tenant, salt_of
from services.gateway.vectors import EmbeddingRequest, ScoreRequest

_INLINE_CHARS = 8192


class VectorJob(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for vectors. `size`: how many numbers of each are told, 0: all. `base64`: as text. `pairs`: of a score,
    which prompts are compared; empty for embeddings."""

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    pooling: Pooling
    deadline_s: float
    size: int = 0
    base64: bool = False
    pairs: list[tuple[int, int]] = []
    salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0
    warning: str = ""
    background: bool = False
    stream: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts)


class VectorPreparer:
    """Turns requests into jobs for one model. `context`: returns the tokens that a prompt may have now."""

    def __init__(self, bundle: TextBundle, config: GatewayConfig, intake: Intake, context: Callable[[], int]) -> None:
        self._bundle = bundle
        self._config = config
        self._context = context
        self._threads = intake.threads
        self._embedding = load_embedding_config(bundle.files)

    async def prepare(
        self,
        request: EmbeddingRequest | ScoreRequest,
        notes: Notes,
        *,
        id: str,
        deadline_ms: str | None,
        tenant: Tenant | None = None,
    ) -> VectorJob:
        """:raises RequestError: what is wrong with the request; nothing has been taken then."""
        deadline_s = deadline_of(self._config, request.timeout, deadline_ms)
        special = request.add_special_tokens is not False
        pairs: list[tuple[int, int]] = []
        size, as_base64 = 0, False
        if isinstance(request, EmbeddingRequest):
            size, as_base64 = self._cut(request.dimensions), request.encoding_format == "base64"
            self._check_values(len(request.inputs), size)
            prompts = await self._encode([(request.inputs, "input")], special)
        else:
            first, second = request.pairs
            texts = {text: index for index, text in enumerate(dict.fromkeys([*first, *second]))}
            self._check_values(len(texts), 0)
            pairs = [(texts[one], texts[other]) for one, other in zip(first, second, strict=True)]
            of_first = list(dict.fromkeys(first))
            rest = [text for text in texts if text not in set(first)]
            prompts = await self._encode([(of_first, "text_1"), (rest, "text_2")], special)
        return VectorJob(
            id=id,
            created=int(time.time()),
            model=request.model or self._bundle.name,
            prompts=prompts,
            pooling=request.pooling or self._embedding.pooling,
            deadline_s=deadline_s,
            size=size,
            base64=as_base64,
            pairs=pairs,
            salt=salt_of("" if tenant is None else tenant.name, request.cache_salt),
            tenant="" if tenant is None else tenant.name,
            weight=1.0 if tenant is None else tenant.settings.weight,
            warning=notes.text,
        )

    def _cut(self, dimensions: int | None) -> int:
        model = self._embedding
        if dimensions is None:
            return 0
        if not model.may_be_cut:
            raise InvalidParameter(
                f"{self._bundle.name} does not say that its embeddings may be cut: leave dimensions out", param="dimensions"
            )
        if model.size and dimensions > model.size:
            raise InvalidParameter(f"dimensions is {dimensions}; an embedding has {model.size}", param="dimensions")
        if model.sizes and dimensions not in model.sizes:
            listed = ", ".join(map(str, model.sizes))
            raise InvalidParameter(
                f"dimensions is {dimensions}; this model's embeddings can be cut to {listed}", param="dimensions"
            )
        return dimensions

    def _check_values(self, count: int, size: int) -> None:
        values, limit = count * (size or self._embedding.size), self._config.max_answer_values
        if values > limit:
            raise InvalidParameter(f"{count} vectors are {values} values; at most {limit} are answered", param="input")

    async def _encode(self, groups: list[tuple[list[str] | list[list[int]], str]], special: bool) -> list[list[int]]:
        limit = self._context()
        tokenizer = self._bundle.tokenizer
        for parts, param in groups:
            if any(not part for part in parts) or not any(parts for parts, _ in groups):
                raise EmptyPrompt(f"{param} is empty: send at least one character or token", param=param)
            for part in parts:
                if len(part) > limit * (tokenizer.longest_token_bytes if isinstance(part, str) else 1):
                    raise ContextLengthExceeded(f"{param} can't fit {limit} tokens", param=param)

        def encode_one(part: str | list[int], param: str) -> list[int]:
            if isinstance(part, str):
                ids = tokenizer.encode(part, special, parse_special=True, max_tokens=limit, param=param)
                if not ids:
                    raise EmptyPrompt(f"{param} makes no token: send some text", param=param)
            else:
                ids = part
            self._bundle.check_ids(ids, param)
            return ids

        def encode() -> list[list[int]]:
            return [encode_one(part, param) for parts, param in groups for part in parts]

        num_chars = sum(len(part) for parts, _ in groups for part in parts)
        return await self._in_thread(encode) if num_chars > _INLINE_CHARS else encode()

    async def _in_thread(self, encode: Callable[[], list[list[int]]]) -> list[list[int]]:
        return await anyio.to_thread.run_sync(encode, limiter=self._threads)
