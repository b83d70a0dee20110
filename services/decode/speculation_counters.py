"""What was proposed for sequences, verified and accepted, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounters:
    """vLLM's `spec_decode_num_drafts`, `_draft_tokens`, `_accepted_tokens` and `_accepted_tokens_per_pos`.

    `num_received`: proposals with tokens that draft workers sent. `num_late`: those of which every token was already decided
    when they arrived. `num_table_hits`: failed proposals whose outcome table had what came instead; `num_table_misses`: those
    whose table had not. `proposals_of_length[k]`: verified proposals of k + 1 tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_received: int = 0
    num_late: int = 0
    num_table_hits: int = 0
    num_table_misses: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    proposals_of_length: list[int] = field(default_factory=list)

    def record(self, proposed: int, accepted: int) -> None:
        if not proposed:
            return
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        missing = proposed - len(self.accepted_per_position)
        if missing > 0:
            self.accepted_per_position += [0] * missing
            self.proposals_of_length += [0] * missing
        self.proposals_of_length[proposed - 1] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1
