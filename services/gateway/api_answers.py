"""JSON schemas of answers that are encoded by hand (`bodies.py`, `whole.py`), for `/openapi.json`. Pure."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/"

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
LOGPROB: Schema = {"type": "number", "maximum": 0}


def reference(name: str) -> Schema:
    return {"$ref": REFERENCE + name}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def const(value: str) -> Schema:
    return {"const": value}


def record(properties: dict[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """An object of just these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_HEAD = {"id": STRING, "created": COUNT, "model": STRING}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
_PIECE_OF_CALL = {
    "index": COUNT,
    "id": STRING,
    "type": const("function"),
    "function": record({"name": STRING, "arguments": STRING}, optional=("name",)),
}
_PROMPT_LOGPROBS = array(
    either(
        NULL,
        {
            "type": "object",
            "additionalProperties": record({"logprob": LOGPROB, "rank": COUNT, "decoded_token": either(STRING, NULL)}),
        },
    )
)

ANSWERS: dict[str, Schema] = {
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens_details": record(dict.fromkeys(_DETAILS, COUNT), optional=_DETAILS),
        },
        optional=("completion_tokens_details",),
    ),
    "TokenLogprob": record(
        {
            "token": STRING,
            "logprob": LOGPROB,
            "bytes": array({"type": "integer", "minimum": 0, "maximum": 255}),
            "top_logprobs": array(reference("TokenLogprob")),
        },
        optional=("top_logprobs",),
    ),
    "ChatLogprobs": either(NULL, record({"content": array(reference("TokenLogprob")), "refusal": NULL})),
    "CompletionLogprobs": either(
        NULL,
        record(
            {
                "tokens": array(STRING),
                "token_logprobs": array(either(LOGPROB, NULL)),
                "top_logprobs": either(NULL, array(either({"type": "object", "additionalProperties": LOGPROB}, NULL))),
                "text_offset": array(COUNT),
            }
        ),
    ),
    "ToolCall": record({"id": STRING, "type": const("function"), "function": record({"name": STRING, "arguments": STRING})}),
    "ChatCompletion": record(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "message": record(
                            {
                                "role": const("assistant"),
                                "content": either(STRING, NULL),
                                "refusal": NULL,
                                "reasoning_content": STRING,
                                "tool_calls": array(reference("ToolCall"), minItems=1),
                            },
                            optional=("reasoning_content", "tool_calls"),
                        ),
                        "logprobs": reference("ChatLogprobs"),
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": reference("Usage"),
            "prompt_logprobs": _PROMPT_LOGPROBS,
        },
        optional=("prompt_logprobs",),
    ),
    "ChatCompletionChunk": record(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "delta": record(
                            {
                                "role": const("assistant"),
                                "content": either(STRING, NULL),
                                "reasoning_content": STRING,
                                "tool_calls": array(record(_PIECE_OF_CALL, optional=("id", "type"))),
                            },
                            optional=("role", "content", "reasoning_content", "tool_calls"),
                        ),
                        "logprobs": reference("ChatLogprobs"),
                        "finish_reason": either(_FINISH, NULL),
                    }
                )
            ),
            "usage": either(reference("Usage"), NULL),
        },
        optional=("usage",),
    ),
    "Completion": record(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": reference("CompletionLogprobs"),
                        "finish_reason": either({"enum": ["stop", "length"]}, NULL),
                        "prompt_logprobs": _PROMPT_LOGPROBS,
                    },
                    optional=("prompt_logprobs",),
                )
            ),
            "usage": either(reference("Usage"), NULL),
        },
        optional=("usage",),
    ),
    "Model": record(
        {
            "id": STRING,
            "object": const("model"),
            "created": COUNT,
            "owned_by": const("penstock"),
            "root": STRING,
            "parent": either(STRING, NULL),
            "max_model_len": {"type": "integer", "minimum": 1},
        }
    ),
    "ModelList": record({"object": const("list"), "data": array(reference("Model"), minItems=1)}),
    "Health": record(
        {"status": const("ok"), "worker": STRING, "models": array(record({"id": STRING, "ready": BOOLEAN}), minItems=1)}
    ),
    "TokenizerInfo": {
        "type": "object",
        "properties": {
            "tokenizer_class": STRING,
            "chat_template": either(STRING, NULL),
            "model_max_length": COUNT,
            "eos_token": either(STRING, NULL),
            "bos_token": either(STRING, NULL),
            "pad_token": either(STRING, NULL),
        },
        "required": ["tokenizer_class", "chat_template", "model_max_length", "eos_token", "bos_token", "pad_token"],
        "description": "Further special tokens are there by their names in transformers.",
    },
    "Version": record({"version": STRING}),
    "Targets": array(
        record({"targets": array(STRING), "labels": {"type": "object", "additionalProperties": STRING}}),
        description="Prometheus's HTTP service discovery.",
    ),
    "Explanations": record(
        {"requests": array({"type": "object", "description": "A choice's timeline: see `Explanation` in docs/protocol.md."})}
    ),
    "RequestRow": {"type": "object", "description": "What became of one request, for the dashboard; its fields may change."},
}
