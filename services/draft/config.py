"""Settings of a draft worker."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.engine.load.precision import QuantizationSetting
from common.engine.settings import EngineServiceConfig
from common.protocol.errors import ConfigError


class DraftConfig(EngineServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draft workers."""

    draft_model: Annotated[
        str,
        Meta(
            description="model that drafts, named as in --model, with the same tokenizer; auto: the one that is shipped for "
            "the model; empty: n-grams of the text so far"
        ),
    ] = ""
    proposal_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="tokens of a proposal; twice what decode verifies, so that a late one still serves; 0: 16 of a draft "
            "model on a GPU, else 10",
        ),
    ] = 0
    draft_branches: Annotated[
        int,
        Meta(
            ge=-1,
            le=16,
            description="answers drafted for places where a draft model's proposal may fail, of all sequences together, in "
            "equal shares; 0: none; -1: 6 on a GPU, none on a CPU",
        ),
    ] = -1
    draft_quantization: Annotated[
        QuantizationSetting,
        Meta(
            description="of a draft model's weights, as --quantization; auto: what that says; where it is auto, too, fp8 on a "
            "GPU that has it, since no answer depends on it"
        ),
    ] = "auto"
    draft_branch_tokens: Annotated[int, Meta(ge=1, le=16, description="tokens drafted behind such an answer")] = 8
    max_sequences: Annotated[int, Meta(ge=1, description="sequences mirrored at once")] = 1024
    max_sequence_tokens: Annotated[int, Meta(ge=2, description="tokens of a sequence that are searched: the last ones")] = 65536
    min_match: Annotated[int, Meta(ge=2, le=64, description="tokens that must agree before a guess is made")] = 2
    max_match: Annotated[int, Meta(ge=2, le=64, description="tokens that are compared at most")] = 8

    def __post_init__(self) -> None:
        """:raises ConfigError: no n-gram is long enough to be proposed from."""
        super().__post_init__()
        if self.min_match > self.max_match:
            raise ConfigError(
                f"--min-match {self.min_match} is above --max-match {self.max_match}, so n-grams would propose nothing: "
                "lower one or raise the other",
                param="min_match",
            )

    def max_proposal(self, *, on_gpu: bool) -> int:
        """Return `proposal_tokens`, or what suits."""
        return self.proposal_tokens or (16 if on_gpu else 10)

    def num_branches(self, *, on_gpu: bool) -> int:
        """Return `draft_branches`, or what suits: on a CPU steps of branches would make the target's slower."""
        if self.draft_branches >= 0:
            return self.draft_branches
        return 6 if on_gpu else 0
