"""JSON schemas of request bodies, from the types that the parser decodes them with. Pure.

`_FURTHER` holds the bounds that are checked after decoding (`openai.check_chat` and the like), in terms of the constants that
are checked; a test sends what lies just outside of each to the parser.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from services.gateway import openai, tools
from services.gateway.api_answers import REFERENCE, Schema
from services.gateway.arguments import Scope
from services.gateway.batches.records import ENDPOINTS, MAX_KEY_CHARS, MAX_METADATA, MAX_VALUE_CHARS, BatchRequest
from services.gateway.parse import SCOPES
from services.gateway.parse_tokens import TOKEN_SCOPES
from services.gateway.structured import FORMATS
from services.gateway.token_bodies import DetokenizeAnswer, TokenizeAnswer
from services.gateway.vectors import MAX_INPUTS, VECTOR_SCOPES
from services.gateway.views.messages_body import MESSAGES_SCOPES
from services.gateway.views.responses_body import MAX_ITEMS, RESPONSES_SCOPES

BODIES: dict[type[msgspec.Struct], Scope] = {
    **SCOPES,
    **TOKEN_SCOPES,
    **RESPONSES_SCOPES,
    **MESSAGES_SCOPES,
    **VECTOR_SCOPES,
    BatchRequest: Scope(BatchRequest.__struct_fields__, {}, {}),
}
"""Every type that a body or an object in one is decoded with, and how the rest of such an object is judged."""

_TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": r"^[a-zA-Z0-9_-]{1,64}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string", "maxLength": 256},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": r"^[a-zA-Z0-9_-]{1,64}$"},
                "arguments": {"type": ["string", "object", "null"], "description": "JSON text."},
            },
        },
    },
}
_MESSAGES: Schema = {"minItems": 1, "maxItems": openai.MAX_MESSAGES}
_LENGTH: Schema = {"not": {"const": 0}}
_TOOLS: Schema = {"maxItems": tools.MAX_TOOLS, "items": _TOOL}
_DOCUMENTS: Schema = {"maxItems": openai.MAX_DOCUMENTS}
_VARIABLES: Schema = {"maxProperties": openai.MAX_TEMPLATE_ARGUMENTS}
_SHARED: dict[str, Schema] = {
    "max_tokens": _LENGTH,
    "logit_bias": {"maxProperties": openai.MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    "response_format": {"required": ["type"], "properties": {"type": {"enum": list(FORMATS)}}},
}

_FURTHER: dict[str, dict[str, Schema]] = {
    "ChatRequest": {
        **_SHARED,
        "messages": _MESSAGES,
        "max_completion_tokens": _LENGTH,
        "chat_template_kwargs": _VARIABLES,
        "documents": _DOCUMENTS,
        "tools": _TOOLS,
    },
    "CompletionRequest": {**_SHARED, "prompt": {"minLength": 1, "minItems": 1}},
    "TokenizeRequest": {
        "messages": _MESSAGES,
        "chat_template_kwargs": _VARIABLES,
        "documents": _DOCUMENTS,
        "tools": _TOOLS,
    },
    "ChatMessage": {
        "role": {"enum": list(openai.ROLES)},
        "tool_calls": {"maxItems": tools.MAX_CALLS, "items": _CALL},
    },
    "ResponsesRequest": {"input": {"minItems": 1, "maxItems": MAX_ITEMS}, "tools": {"maxItems": tools.MAX_TOOLS}},
    "MessagesRequest": {"messages": _MESSAGES, "tools": {"maxItems": tools.MAX_TOOLS}},
    "EmbeddingRequest": {"input": {"minLength": 1, "minItems": 1}},
    "ScoreRequest": {"text_1": {"maxItems": MAX_INPUTS}, "text_2": {"maxItems": MAX_INPUTS}},
    "BatchRequest": {
        "endpoint": {"enum": list(ENDPOINTS)},
        "input_file_id": {"pattern": "^file-[0-9a-f]{1,64}$"},
        "completion_window": {"pattern": "^[1-9][0-9]{0,6}[smhd]$"},
        "metadata": {
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
        },
    },
    "ContentPart": {"type": {"enum": sorted(openai.TEXT_PARTS)}},
}
"""By type and argument: what is said of it, of the alternative that it is about."""

_OF_TYPE = {
    "array": {"minItems", "maxItems", "items"},
    "object": {"required", "properties", "maxProperties", "propertyNames", "additionalProperties"},
    "string": {"minLength", "enum", "pattern"},
    "integer": {"not"},
}


def body_schemas(*, max_n: int) -> dict[str, Schema]:
    """The schema of each type of BODIES, and of answers that have a type, by name."""
    _, found = msgspec.json.schema_components([*BODIES, TokenizeAnswer, DetokenizeAnswer], ref_template=REFERENCE + "{name}")
    for kind, scope in BODIES.items():
        schema = found[kind.__name__]
        schema["description"] = " ".join((inspect.getdoc(kind) or "").split())
        if kind is not BatchRequest:
            schema.pop("additionalProperties", None)  # what is not obeyed is judged by `scope`
        properties: dict[str, Any] = schema["properties"]
        for name, further in _FURTHER.get(kind.__name__, {}).items():
            _narrow(properties[name], further)
        for name, neutral in scope.refused.items():
            if name not in properties:
                properties[name] = {"description": "Refused, unless it asks for nothing.", "enum": [None, *neutral]}
        for name in scope.ignored:
            properties.setdefault(name, {"description": "Has no effect; the answer's warning says so."})
        if "n" in scope.obeyed:
            properties["n"]["anyOf"][0]["maximum"] = min(max_n, openai.MAX_CHOICES)
    return found


def _narrow(schema: Schema, further: Schema) -> None:
    """Adds what is said of arrays to the array among the alternatives, and so on."""
    for alternative in schema.get("anyOf", [schema]):
        said = _OF_TYPE.get(alternative.get("type", ""), ())
        alternative.update({key: value for key, value in further.items() if key in said})
