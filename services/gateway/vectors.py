"""The bodies of /v1/embeddings (OpenAI's) and /v1/score (vLLM's): schemas, and from bytes to a request in steps. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.protocol.errors import InvalidParameter
from services.gateway import arguments
from services.gateway.arguments import Notes, Scope
from services.gateway.decoding import joined
from services.gateway.json_slices import Span, Steps
from services.gateway.openai import TokenId
from services.gateway.parse import SMALL_BYTES, decode_object, judged_members, text_or_ids

VectorKind = Literal["embedding", "score"]

MAX_INPUTS = 2048

Text = str | list[str]


class VectorArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What both share. `pooling`: not given, the model's own. `timeout` and `cache_salt`: as in completions."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class EmbeddingRequest(VectorArguments, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input`: a string, strings, token ids, or lists of token ids."""

    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One entry per vector.

        :raises InvalidParameter: if strings, ids and lists of ids are mixed.
        """
        if isinstance(self.input, str):
            return [self.input]
        kinds = set(map(type, self.input))
        found: Any = self.input
        if kinds == {int}:
            return [found]
        if len(kinds) <= 1:
            return found
        raise InvalidParameter("input mixes strings, token ids and lists of token ids: send one kind", param="input")


class ScoreRequest(VectorArguments, frozen=True, kw_only=True):
    """POST /v1/score. One text against each of several, or as many against as many, pair by pair."""

    text_1: Text
    text_2: Text

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """As many texts as others.

        :raises InvalidParameter: if the numbers don't fit.
        """
        first, second = (text if isinstance(text, list) else [text] for text in (self.text_1, self.text_2))
        if len(first) == 1 and second:
            return first * len(second), second
        if len(first) != len(second):
            raise InvalidParameter(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: send one, or as many", param="text_2"
            )
        return first, second


_REFUSED: arguments.Table = {
    **arguments.REFUSED,
    "activation": (True,),
    "apply_chat_template": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "input_type": (),
    "instruction": ("",),
    "max_tokens_per_doc": (),
    "messages": (),
    "normalize": (True,),
    "softmax": (),
    "task": (),
    "use_activation": (True,),
}
_IGNORED: arguments.Table = {name: values for name, values in arguments.IGNORED.items() if name not in _REFUSED}
_OBEYED: dict[VectorKind, tuple[Any, tuple[str, ...]]] = {
    "embedding": (msgspec.json.Decoder(EmbeddingRequest), ("input",)),
    "score": (msgspec.json.Decoder(ScoreRequest), ("text_1", "text_2")),
}
VECTOR_SCOPES: dict[type[msgspec.Struct], Scope] = {
    kind: Scope(
        kind.__struct_fields__,
        {name: values for name, values in _REFUSED.items() if name not in kind.__struct_fields__},
        _IGNORED,
    )
    for kind in (EmbeddingRequest, ScoreRequest)
}
"""How what is not obeyed is judged."""


def parse_vectors(
    kind: VectorKind, body: bytes, *, max_prompt_tokens: int, notes: Notes
) -> Steps[EmbeddingRequest | ScoreRequest]:
    """What is ignored is told to `notes`, which may refuse it.

    :raises InvalidParameter: naming the argument, for anything that a well-formed request does not have.
    :raises ContextLengthExceeded: if an input holds more token ids than `max_prompt_tokens`.
    """
    decoder, large = _OBEYED[kind]
    scope = VECTOR_SCOPES[EmbeddingRequest if kind == "embedding" else ScoreRequest]
    if len(body) <= SMALL_BYTES:
        request = decode_object(decoder, body, scope, notes)
    else:
        found = yield from judged_members(body, None, scope, notes)
        small = {name: body[span.start : span.end] for name, span in found.items() if name not in large}
        if (size := sum(map(len, small.values()))) > SMALL_BYTES:
            raise InvalidParameter(
                f"the arguments beside {large[0]} take {size} bytes", param=max(small, key=lambda n: len(small[n]))
            )
        stand_ins = {name: b'""' for name in large if name in found}
        request = decode_object(decoder, joined({**small, **stand_ins}), scope, notes)
        texts: dict[str, Any] = {}
        for name in stand_ins:
            texts[name] = yield from _texts(body, found[name], max_prompt_tokens, name, ids=kind == "embedding")
        request = msgspec.structs.replace(request, **texts)
    for name in large:
        value = getattr(request, name)
        if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
            raise InvalidParameter(f"{name} has {len(value)} entries; send at most {MAX_INPUTS}", param=name)
    return request


def _texts(body: bytes, span: Span, max_tokens: int, place: str, *, ids: bool) -> Steps[Any]:
    value = yield from text_or_ids(body, span, max_tokens, place=place, limit=MAX_INPUTS)
    if not ids and isinstance(value, list) and not all(isinstance(text, str) for text in value):
        raise InvalidParameter(f"invalid {place}: expected strings", param=place)
    return value
