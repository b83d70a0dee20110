"""What a decode scheduler is given to call: who proposes tokens, and how much of prompts a step may compute."""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.engine.outcomes import Outcome
from common.engine.plan import Room
from common.engine.sequence import Sequence

BeginStep = Callable[[list[Sequence]], Collection[Sequence] | None]
"""`begin_step(decoding)`: a step that decodes these is about to be planned. Returns those for which the others below are asked;
None: all of them."""
Propose = Callable[[Sequence, int], list[int]]
"""`propose(sequence, limit)`: at most `limit` token ids that may follow; [] for none. `begin_step(decoding)` comes before."""
Foresee = Callable[[Sequence, int], list[Outcome]]
"""`foresee(sequence, limit)`: at most `limit` token ids that may follow each likely outcome of the step in flight that verifies
`sequence.verifying`; [] for none."""
RoomFor = Callable[[Sequence, int], Room]
"""`room_for(sequence, limit)`: how many tokens, at most `limit`, the device may choose and verify in the sequence's row, and
from where. What is posted is only for a row that is fed."""
Wanted = Callable[[Sequence], tuple[int, float]]
"""`wanted(sequence)`: how many tokens the engine's head drafts behind the sequence's row of this step, and the chance below
which it stops (`StepRow.least_chance`); -1 tokens where it need not even note hidden states."""

Recompute = Callable[[Sequence], int]
"""`recompute(sequence)`: how many of its last tokens are computed here although their KV was copied; 0: none."""
PromptLimit = Callable[[int, int, float], int]
"""`prompt_limit(rows, budget, needed_per_s)`: how many prompt tokens a step computes beside so many decoding rows, `budget` at
most. `needed_per_s`: prompt tokens a second that bring first tokens in time (`needed_rate`)."""
