"""What several clients are asked."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

PARIS = "Paris is the capital of France. Say so as JSON with name, country and size."

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A town."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]
