"""What a draft model computes next, for which mirrors, and what of it still holds when updates come. Pure.

A mirror's text, and the KV of it:

    text  [0, num_confirmed)               what decode has said
          [num_confirmed, len(text))       drafted behind it: `max_drafted` tokens, `stay_tokens` more beside others
    KV    [0, num_computed)                valid; num_computed < len(text): what follows the last token is not known yet

    plan ─► (another plan, for a runner that runs ahead) ─► the step has run: commit ─► updates, proposals ─► plan ─► …

An update that agrees with the draft confirms a part of it, and nothing is computed again. One that disagrees cuts the text
behind the last token that agrees; the KV up to there stays. A mirror with a gap keeps what it has until it is sent whole again.
Where what disagrees was drafted as a branch (`branches.py`), that becomes the text, and nothing is computed again either.
What steps compute meanwhile of a text that is cut is void (`flights.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.cache.grouped_pool import GroupedPool
from common.engine.plan import UNKNOWN, RowSamples, StepPlan, StepResult, StepRow, part_of
from common.ops.sampling.gumbel import GREEDY_BELOW
from common.protocol.draft_messages import DraftBranch, DraftSampling
from common.protocol.errors import OutOfBlocks, ProtocolError
from common.protocol.handles import WorkerRef
from services.draft.branches import MAX_PROMPT_TABLES, Branches
from services.draft.choices import GREEDY_TOP_TOKENS, TOP_TOKENS, Choice, drawn_in
from services.draft.flights import Flights, in_places
from services.draft.mirror import Branch, Mirror, params_of
from services.draft.mirror_blocks import MirrorBlocks
from services.draft.proposer import MirrorKey

MAX_CATCH_UP_TOKENS = 64
"""A mirror with at most so many tokens to compute goes with those that draft; one with more is a prompt, computed in chunks."""
_ACCEPTANCE_WEIGHT = 0.1


class Drafter:
    """A `Proposer` whose proposals a runner computes: `plan`, execute, `commit`; steps are committed in the order of plans.

    max_sequences: mirrors held at most, and rows of a step. max_drafted: tokens drafted ahead of what is confirmed.
    token_budget: tokens that a step computes at most, beside one of each row. max_context: tokens of the model's context; a
    mirror that is as long, or fills the pool, is not drafted further.
    Where blocks run out, branches go first, and then the mirror that was updated least recently.

    num_branches: of all mirrors, each with `branch_tokens` tokens behind the first; they have at most `branch_step_tokens`
    tokens of a step. branches_beside: whether they run beside the mirrors' rows, where a larger step takes no longer, or only
    in steps of their own.

    stay_tokens: how much further a mirror is drafted beside others that need it, in the blocks that it has. Where a step has
    the rows of the one before, the host does less.
    """

    def __init__(
        self,
        pool: GroupedPool,
        *,
        max_sequences: int,
        max_drafted: int,
        token_budget: int,
        max_context: int,
        vocab_size: int,
        num_branches: int = 0,
        branch_tokens: int = 4,
        branch_step_tokens: int = 64,
        branches_beside: bool = True,
        stay_tokens: int = 0,
    ) -> None:
        self.blocks = MirrorBlocks(pool)
        self.max_sequences = max_sequences
        self.max_drafted = max_drafted
        self.stay_tokens = stay_tokens
        self.token_budget = token_budget
        self.max_context = min(max_context, self.blocks.longest)
        self.vocab_size = vocab_size
        self.num_tokens_drafted = self.num_tokens_in_vain = 0
        self.num_evicted = self.num_broken = 0
        self.flights = Flights()
        self.branches = Branches(
            self.blocks,
            self.flights,
            count=num_branches,
            length=branch_tokens,
            reach=max_drafted,
            step_tokens=min(branch_step_tokens, token_budget),
            max_context=self.max_context,
        )
        self.branches_beside = branches_beside
        self._mirrors: dict[MirrorKey, Mirror] = {}  # least recently updated first

    def __len__(self) -> int:
        return len(self._mirrors)

    # -- mirrors

    def update(self, key: MirrorKey, base: int, tokens: Sequence[int], sampling: DraftSampling | None = None) -> bool:
        """See `Proposer.update`. A mirror with a gap stays, so that what is the same of its prefix is not computed again."""
        mirror = self._mirrors.pop(key, None)
        if mirror is not None:
            self._mirrors[key] = mirror
        try:
            params = params_of(sampling or DraftSampling(), tokens, self.vocab_size)
        except ProtocolError:
            self.close(key)
            raise
        if base and (mirror is None or not mirror.is_whole or not 0 < base <= mirror.num_confirmed):
            if mirror is not None:
                mirror.is_whole = False
            return False
        if mirror is None:
            while len(self._mirrors) >= self.max_sequences:
                self._evict(next(iter(self._mirrors.values())))
            self._mirrors[key] = mirror = Mirror(key, self.blocks.new_tables())
        if not base:
            if params != mirror.sampling:
                self._cut(mirror, mirror.num_confirmed, mirror.num_confirmed - 1)
            mirror.sampling, mirror.is_whole, mirror.is_broken, mirror.proposed_end = params, True, False, 0
            asked = GREEDY_TOP_TOKENS if params.temperature < GREEDY_BELOW else TOP_TOKENS
            mirror.asking = msgspec.structs.replace(params, logprobs=asked)
            mirror.prompt_tokens = max(1, sampling.prompt_tokens if sampling else 1)
        self._confirm(mirror, base, tokens)
        mirror.table_due = True
        return True

    def propose(self, keys: Sequence[MirrorKey], num_tokens: int) -> list[list[int]]:
        """See `Proposer.propose`. What was proposed before and is still there is not proposed again."""
        return [self._proposal(self._mirrors.get(key))[:num_tokens] for key in keys]

    def table(self, key: MirrorKey) -> list[DraftBranch]:
        """See `Proposer.table`."""
        mirror = self._mirrors.get(key)
        at_once = len(self._mirrors) <= MAX_PROMPT_TABLES
        found = [] if mirror is None else self.branches.table(mirror, at_once=at_once)
        if mirror is not None and found:
            mirror.proposed_end = 0  # a table goes with the row that it is about
        return found

    def length(self, key: MirrorKey) -> int:
        mirror = self._mirrors.get(key)
        return 0 if mirror is None else mirror.num_confirmed

    def num_drafted(self, key: MirrorKey) -> int:
        """Tokens drafted behind the confirmed ones, 0 when there is no such mirror."""
        mirror = self._mirrors.get(key)
        return 0 if mirror is None else mirror.num_drafted

    def close(self, key: MirrorKey) -> None:
        mirror = self._mirrors.pop(key, None)
        if mirror is None:
            return
        mirror.is_closed = True
        self.num_tokens_in_vain += mirror.num_drafted
        self.branches.drop_all(mirror)
        self.blocks.release(mirror.tables, mirror.air.until)

    def close_worker(self, decode: WorkerRef) -> int:
        keys = [key for key in self._mirrors if key[0] == decode]
        for key in keys:
            self.close(key)
        return len(keys)

    def clear(self) -> None:
        for key in list(self._mirrors):
            self.close(key)

    # -- steps

    def plan(self) -> StepPlan | None:
        """Return the next step; None when every mirror is drafted as far ahead as it may be, or waits for a step in the air.

        Mirrors with the fewest drafted tokens come first: decode uses these up soonest. Prompts get what is left of the budget,
        the one that has waited longest first. What is left of both is for branches. Rows have the order of the step before.
        """
        self.flights.begin()
        self._is_short = False
        pending = {mirror: self.flights.pending(mirror) for mirror in self._mirrors.values() if self._may_draft(mirror)}
        catch_up = min(MAX_CATCH_UP_TOKENS, self.token_budget)
        drafting = [mirror for mirror, count in pending.items() if 0 < count <= catch_up]
        if all(mirror.num_ahead >= self.max_drafted for mirror in drafting):
            drafting = []
        prompts = [mirror for mirror, count in pending.items() if count > catch_up]
        drafting.sort(key=lambda mirror: (mirror.num_ahead, mirror.last_step))
        prompts.sort(key=lambda mirror: mirror.last_step)
        budget, flight, rows = self.token_budget, self.flights.planning, list[StepRow]()
        chosen: list[Mirror] = []
        for mirror in drafting[: self.max_sequences]:
            if pending[mirror] - 1 <= budget:
                chosen.append(mirror)
                budget -= pending[mirror] - 1
        for index in in_places([mirror.air.place for mirror in chosen]):
            if row := self._row(chosen[index], pending[chosen[index]]):
                rows.append(row)
        for mirror in prompts:
            if budget > 0 and (row := self._row(mirror, part_of(mirror.begin, pending[mirror], budget))):
                rows.append(row)
                budget -= len(row.tokens)
        rows += self._branch_rows(min(budget, self.branches.step_tokens), alone=not rows)
        return StepPlan(flight.step, rows, flight.copies) if self.flights.launch() else None

    def commit(self, plan: StepPlan, result: StepResult) -> list[MirrorKey]:
        """Take the oldest step's tokens. Return the mirrors that were drafted further."""
        flight = self.flights.land(plan)
        self.blocks.ended(flight.step)
        drafted: dict[MirrorKey, None] = {}
        choices = drawn_in(plan, result, self.vocab_size)
        for entry, row, samples, choice in zip(flight.entries, plan.rows, result.rows, choices, strict=True):
            line = entry.line
            if not entry.holds:
                continue
            if isinstance(line, Branch):
                if self.branches.commit(line, row, samples, choice):
                    drafted[line.mirror.key] = None
            elif self._commit(line, row, samples, choice):
                drafted[line.key] = None
        return list(drafted)

    def _commit(self, mirror: Mirror, row: StepRow, samples: RowSamples, choice: Choice | None) -> bool:
        """Take a mirror's token, if there is one. Return whether it was drafted further."""
        end = mirror.num_computed = row.start + len(row.tokens)
        has_token = False
        if row.num_samples:
            token = samples.tokens[0]
            has_token = 0 <= token < self.vocab_size
            if has_token and end < len(mirror.text):  # decode has said meanwhile what follows
                has_token = False
                if mirror.text[end] != token:  # which steps in the air may have been fed with
                    mirror.air.void()
            elif has_token:
                if choice is not None:
                    mirror.choices[len(mirror.text)] = choice
                mirror.text.append(token)
                self.num_tokens_drafted += 1
            else:
                mirror.is_broken, mirror.num_computed = True, mirror.num_computed - 1
                self.num_broken += 1
                mirror.air.void()
        self.blocks.let_go(mirror.tables, min(mirror.num_computed, mirror.num_confirmed - 1))
        return has_token

    def abort(self) -> int:
        """A step failed, and those behind it: close their mirrors, which their decode workers find out by a gap. Returns how
        many there were."""
        self.blocks.ended(self.flights.planning.step)
        mirrors = self.flights.fail()
        for mirror in mirrors:
            self.close(mirror.key)
        return len(mirrors)

    def check(self) -> None:
        """:raises AssertionError: if the pool's counters are wrong, or blocks are held that no mirror has."""
        self.blocks.pool.check()
        held = [*self.blocks.late, *(mirror.tables for mirror in self._mirrors.values())]
        branches = [branch for mirror in self._mirrors.values() for branch in mirror.branches.values()]
        held += [self.blocks.behind(branch.tables, branch.position) for branch in branches]
        for index, group in enumerate(self.blocks.pool.groups):
            owned = [block for tables in held for block in tables[index] if block >= 0]
            assert group.pool.usage().owned == len(owned) == len(set(owned))

    # -- within

    def _confirm(self, mirror: Mirror, base: int, tokens: Sequence[int]) -> None:
        """The text from `base` on is `tokens`; what was drafted behind them stays if they agree with the text."""
        end = base + len(tokens)
        agreed = _agreed(mirror.text, base, tokens)
        self._measure(mirror, agreed, end)
        if agreed < end and (branch := self.branches.take(mirror, agreed, tokens[agreed - base])):
            self._go_on_with(mirror, branch)
            agreed = _agreed(mirror.text, base, tokens)
        if agreed < end:
            if agreed < len(mirror.text):
                self._cut(mirror, agreed, agreed)
            mirror.text += tokens[agreed - base :]
            mirror.proposed_end = 0
        elif end < mirror.num_confirmed:
            self._cut(mirror, end, end - 1)
        mirror.num_confirmed = end
        for index in [index for index in mirror.choices if index < end]:
            del mirror.choices[index]
        self.branches.prune(mirror)

    def _measure(self, mirror: Mirror, agreed: int, end: int) -> None:
        """Drafted tokens up to index `agreed` hold; the next one does not, if it is before `end`."""
        drafted = range(mirror.num_confirmed, min(end, len(mirror.text), agreed + 1))
        for index in drafted:
            mirror.acceptance += _ACCEPTANCE_WEIGHT * ((index < agreed) - mirror.acceptance)

    def _go_on_with(self, mirror: Mirror, branch: Branch) -> None:
        """The branch is the mirror's text from now on; its first token is confirmed."""
        self._cut(mirror, branch.position, branch.position)
        self.blocks.take_over(mirror.tables, branch.tables, branch.position)
        self.blocks.release(mirror.tables, mirror.air.until, behind=branch.position)
        self.flights.take_over(branch, mirror)
        mirror.tables, mirror.num_computed = branch.tables, branch.num_computed
        mirror.text += branch.tokens
        mirror.choices |= dict(enumerate(branch.choices, branch.position + 1))
        self.num_tokens_drafted += len(branch.choices)

    def _cut(self, mirror: Mirror, length: int, max_computed: int) -> None:
        """Drop the text from index `length` on. KV of at most `max_computed` tokens stays: of all but the last one where
        nothing else follows, since the next token's logits are needed."""
        self.num_tokens_in_vain += len(mirror.text) - max(length, min(mirror.num_confirmed, len(mirror.text)))
        del mirror.text[length:]
        self.branches.drop_all(mirror, length)
        for index in [index for index in mirror.choices if index >= length]:
            del mirror.choices[index]
        mirror.proposed_end = 0
        mirror.num_computed = max(0, min(mirror.num_computed, max_computed))
        mirror.air.void()
        if not self.blocks.holds(mirror.tables, mirror.num_computed):
            self.branches.drop_all(mirror)  # which read its blocks
            self.blocks.release(mirror.tables, mirror.air.until)
            mirror.num_computed = 0

    def _proposal(self, mirror: Mirror | None) -> list[int]:
        if mirror is None:
            return []
        end = min(len(mirror.text), mirror.num_confirmed + self.max_drafted)
        if mirror.proposed_end == end:
            return []
        mirror.proposed_end = end
        return mirror.text[mirror.num_confirmed : end]

    def _may_draft(self, mirror: Mirror) -> bool:
        return (
            mirror.is_whole
            and not mirror.is_broken
            and 0 < len(mirror.text) < self.max_context
            and (mirror.num_ahead < self.max_drafted or self._may_stay(mirror))
        )

    def _may_stay(self, mirror: Mirror) -> bool:
        """Whether a mirror that is drafted as far as it may be goes on, in the blocks that it has."""
        length = mirror.num_confirmed + mirror.num_ahead
        is_near = mirror.num_ahead < self.max_drafted + self.stay_tokens
        return is_near and length <= len(mirror.tables[0]) * self.blocks.block_tokens

    def _row(self, mirror: Mirror, num_tokens: int) -> StepRow | None:
        """Return a row with the mirror's next `num_tokens` tokens; None where there is no room for it in this step."""
        if len(self.flights.planning.entries) >= self.max_sequences or mirror.is_closed:
            return None
        start, end = mirror.begin, mirror.begin + num_tokens
        if not self._make_room(mirror, start, end):
            return None
        mirror.last_step = self.flights.planning.step
        sampled = end >= len(mirror.text)
        return StepRow(
            tokens=mirror.text[start:end] or [UNKNOWN],
            start=start,
            feed=self.flights.add(mirror, end, sampled=sampled),
            blocks=mirror.tables[0],
            more_blocks=mirror.tables[1:],
            num_samples=int(sampled),
            sampling=mirror.asking if self._branches_each else mirror.sampling,
            prompt_tokens=mirror.prompt_tokens,
        )

    @property
    def _branches_each(self) -> int:
        return self.branches.share(len(self._mirrors))

    def _branch_rows(self, budget: int, *, alone: bool) -> list[StepRow]:
        """Return rows of at most `budget` tokens; none while a mirror waits for blocks, which they would keep by beginning anew
        whenever they went for it. alone: the step has no others."""
        if self._is_short or not (share := self._branches_each) or not (alone or self.branches_beside):
            return []
        mirrors = [mirror for mirror in self._mirrors.values() if mirror.is_whole and not mirror.is_broken]
        return self.branches.rows(mirrors, share, budget, self.max_sequences - len(self.flights.planning.entries))

    def _make_room(self, mirror: Mirror, start: int, end: int) -> bool:
        """Take the blocks of a row, if need be from the mirror that was updated least recently of those not in this step."""
        while True:
            try:
                self.blocks.cover(mirror.tables, start, end)
            except OutOfBlocks:
                if self.branches.give_way(self._mirrors.values()):
                    continue
                victim = next((other for other in self._mirrors.values() if not other.air.num_steps), mirror)
                if victim is mirror and self.flights:
                    self._is_short = True
                    return False  # others of steps hold what it lacks: perhaps the next one has room
                self._evict(victim)
                if victim is mirror:
                    return False
            else:
                return True

    def _evict(self, mirror: Mirror) -> None:
        self.num_evicted += 1
        self.close(mirror.key)


def _agreed(text: Sequence[int], base: int, tokens: Sequence[int]) -> int:
    """Return the index up to which `text` has `tokens` from index `base` on."""
    end = min(base + len(tokens), len(text))
    return next((index for index in range(base, end) if text[index] != tokens[index - base]), end)
