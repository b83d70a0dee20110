"""Settings of a draft worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.engine.settings import EngineServiceConfig


class DraftConfig(EngineServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draft workers."""

    draft_model: Annotated[
        str,
        Meta(description="model that drafts, named as in --model, with the same tokenizer; empty: n-grams of the text so far"),
    ] = ""
    proposal_tokens: Annotated[
        int, Meta(ge=1, le=64, description="tokens of a proposal; twice what decode verifies, so that a late one still serves")
    ] = 10
    max_sequences: Annotated[int, Meta(ge=1, description="sequences mirrored at once")] = 1024
    max_sequence_tokens: Annotated[int, Meta(ge=2, description="tokens of a sequence that are searched: the last ones")] = 65536
    min_match: Annotated[int, Meta(ge=2, le=64, description="tokens that must agree before a guess is made")] = 2
    max_match: Annotated[int, Meta(ge=2, le=64, description="tokens that are compared at most")] = 8
