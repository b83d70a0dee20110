"""What a draft worker with a model holds of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.cache.block_table import BlockTable
from common.protocol.messages import SamplingParams
from services.draft.choices import Choice
from services.draft.proposer import MirrorKey


@dataclass(slots=True, eq=False)
class Branch:
    """Another text behind the first `position` tokens of a mirror's: `tokens`, of which the first is an alternative to what
    the mirror has drafted there, and the others are drafted behind it.

    tables: shares its full blocks before `position` with the mirror. num_computed: tokens with valid KV, from the text's first
    one on. choices: of `tokens[1:]`. is_over: it is not drafted further.
    """

    mirror: Mirror
    position: int
    tokens: list[int]
    tables: list[BlockTable]
    num_computed: int
    choices: list[Choice] = field(default_factory=list)
    is_over: bool = False
    in_step: bool = False
    is_closed: bool = False

    @property
    def end(self) -> int:
        """Tokens of the text with this branch."""
        return self.position + len(self.tokens)


BranchKey = tuple[int, int]
"""Position and first token."""


@dataclass(slots=True, eq=False)
class Mirror:
    """`is_whole`: no update was lost. `is_broken`: its logits were not finite; it is not continued until it is opened anew.
    `in_step`: a step that runs uses its blocks. `proposed_end`: length of the text that was proposed last. `last_step`: number
    of the step that it was in last.

    choices: of drafted tokens, by position. acceptance: moving average of drafted tokens that were confirmed. `table_changed`:
    since it was proposed last; `table_due`: an update has come since then.
    """

    key: MirrorKey
    tables: list[BlockTable]
    text: list[int] = field(default_factory=list)
    num_confirmed: int = 0
    num_computed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    asking: SamplingParams = field(default_factory=SamplingParams)
    prompt_tokens: int = 1
    is_whole: bool = True
    is_broken: bool = False
    in_step: bool = False
    is_closed: bool = False
    proposed_end: int = 0
    last_step: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    branches: dict[BranchKey, Branch] = field(default_factory=dict)
    acceptance: float = 0.7
    table_changed: bool = False
    table_due: bool = False

    @property
    def num_drafted(self) -> int:
        return len(self.text) - self.num_confirmed

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.text) - self.num_computed
