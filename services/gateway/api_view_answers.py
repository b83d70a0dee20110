"""JSON schemas of the answers of `/v1/responses`, `/v1/messages`, `/v1/embeddings` and `/v1/score`. Pure."""

from __future__ import annotations

from services.gateway.api_answers import BOOLEAN, COUNT, NULL, STRING, Schema, array, const, either, record, reference

_OBJECT: Schema = {"type": "object"}
_NAME = either(STRING, NULL)
_NUMBER: Schema = {"type": "number"}
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}

_VECTORS_HEAD = {"id": STRING, "object": const("list"), "created": COUNT, "model": STRING}

VIEW_ANSWERS: dict[str, Schema] = {
    "Response": record(
        {
            "id": STRING,
            "object": const("response"),
            "created_at": COUNT,
            "model": STRING,
            "background": {"const": False},
            "instructions": _NAME,
            "max_output_tokens": either(COUNT, NULL),
            "metadata": {"type": "object", "additionalProperties": STRING},
            "parallel_tool_calls": BOOLEAN,
            "previous_response_id": NULL,
            "reasoning": record({"effort": _NAME, "summary": NULL}),
            "store": {"const": False},
            "temperature": _NUMBER,
            "text": record({"format": _OBJECT}),
            "tool_choice": either(STRING, _OBJECT),
            "tools": array(_OBJECT),
            "top_logprobs": COUNT,
            "top_p": _NUMBER,
            "truncation": const("disabled"),
            "user": _NAME,
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "error": either(NULL, record({"code": STRING, "message": STRING})),
            "incomplete_details": either(NULL, record({"reason": const("max_output_tokens")})),
            "output": array(reference("ResponseItem")),
            "usage": either(
                NULL,
                record(
                    {
                        "input_tokens": COUNT,
                        "input_tokens_details": record({"cached_tokens": COUNT}),
                        "output_tokens": COUNT,
                        "output_tokens_details": record({"reasoning_tokens": COUNT}),
                        "total_tokens": COUNT,
                    }
                ),
            ),
        }
    ),
    "ResponseItem": either(
        record(
            {
                "id": STRING,
                "type": const("message"),
                "role": const("assistant"),
                "status": _STATUS,
                "content": array(
                    record(
                        {
                            "type": const("output_text"),
                            "annotations": array(_OBJECT),
                            "logprobs": array(reference("TokenLogprob")),
                            "text": STRING,
                        }
                    )
                ),
            }
        ),
        record(
            {
                "id": STRING,
                "type": const("reasoning"),
                "status": _STATUS,
                "summary": array(_OBJECT),
                "content": array(record({"type": const("reasoning_text"), "text": STRING})),
            }
        ),
        record(
            {
                "id": STRING,
                "type": const("function_call"),
                "status": _STATUS,
                "call_id": STRING,
                "name": STRING,
                "namespace": STRING,
                "arguments": STRING,
            },
            optional=("namespace",),
        ),
        record(
            {
                "id": STRING,
                "type": const("custom_tool_call"),
                "status": _STATUS,
                "call_id": STRING,
                "name": STRING,
                "namespace": STRING,
                "input": STRING,
            },
            optional=("namespace",),
        ),
    ),
    "ResponseEvent": {
        "type": "object",
        "required": ["type", "sequence_number"],
        "properties": {
            "type": {"type": "string", "pattern": r"^response\."},
            "sequence_number": COUNT,
            "response": reference("Response"),
            "item": reference("ResponseItem"),
            "delta": STRING,
        },
    },
    "ResponseInputTokens": record({"object": const("response.input_tokens"), "input_tokens": COUNT}),
    "MessageUsage": record(
        {
            "input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "output_tokens": COUNT,
            "output_tokens_details": record({"thinking_tokens": COUNT}),
        },
        optional=("output_tokens_details",),
    ),
    "MessageAnswer": record(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(
                either(
                    record({"type": const("text"), "text": STRING}),
                    record({"type": const("thinking"), "thinking": STRING, "signature": STRING}),
                    record({"type": const("tool_use"), "id": STRING, "name": STRING, "input": _OBJECT}),
                )
            ),
            "stop_reason": {
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", None]
            },
            "stop_sequence": _NAME,
            "usage": reference("MessageUsage"),
        }
    ),
    "MessageEvent": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {
                "enum": [
                    "message_start",
                    "content_block_start",
                    "content_block_delta",
                    "content_block_stop",
                    "message_delta",
                    "message_stop",
                    "ping",
                    "error",
                ]
            },
            "message": reference("MessageAnswer"),
            "index": COUNT,
        },
    },
    "MessageTokens": record({"input_tokens": COUNT}),
    "Embeddings": record(
        {
            **_VECTORS_HEAD,
            "data": array(
                record({"object": const("embedding"), "index": COUNT, "embedding": either(STRING, array(_NUMBER, minItems=1))})
            ),
            "usage": reference("Usage"),
        }
    ),
    "Scores": record(
        {
            **_VECTORS_HEAD,
            "data": array(
                record({"index": COUNT, "object": const("score"), "score": {"type": "number", "minimum": -1, "maximum": 1}})
            ),
            "usage": reference("Usage"),
        }
    ),
}
