"""Answers to what a target may say instead of a mirror's draft: short branches, drafted with what its steps leave. Pure.

    text        … c c c | d d d d d d        c confirmed, d drafted; decode verifies the first few d
    branches                a x x            a: the runner-up where d may be rejected; x: drafted behind it
                            b x x
                                a x x

The likeliest first rejections get a branch each (`choices.likeliest`). A branch reads the mirror's full blocks before it, and
copies the one in which it begins. It never takes blocks or room in a step that a mirror could use, and it goes as soon as its
place is decided; an update that says what it says makes it the mirror's draft, KV and all (`take`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from common.cache.grouped_pool import HOLE
from common.engine.plan import UNKNOWN, BlockCopy, RowSamples, StepRow
from common.protocol.draft_messages import DraftBranch
from common.protocol.errors import OutOfBlocks
from services.draft.choices import MIN_CHANCE, Choice, likeliest
from services.draft.flights import Flights, in_places
from services.draft.mirror import Branch, BranchKey, Mirror
from services.draft.mirror_blocks import MirrorBlocks

MAX_PROMPT_TABLES = 8
"""Mirrors up to which every step's news of their branches are sent; of more they are too many messages."""
MAX_TABLE_TOKENS = 96
"""Token ids of a table at most, of up to five bytes each."""


class Branches:
    """count: of all mirrors together, in equal shares; 0: none. length: tokens drafted behind a branch's first one.
    reach: tokens of a proposal, within which branches begin. step_tokens: of all branches in a step at most."""

    def __init__(
        self, blocks: MirrorBlocks, flights: Flights, *, count: int, length: int, reach: int, step_tokens: int, max_context: int
    ) -> None:
        self.blocks = blocks
        self.flights = flights
        self.length = max(1, min(length, MAX_TABLE_TOKENS - 1))
        self.count = count
        self.reach = reach
        self._most_each = MAX_TABLE_TOKENS // (1 + self.length)
        self.step_tokens = step_tokens
        self.max_context = max_context
        self.num_tokens = 0
        self.num_taken = 0

    # -- what there is

    def share(self, num_mirrors: int) -> int:
        """Return how many a mirror has at most. A step takes longer with each row, most of it on the host: of many mirrors,
        their next tokens are worth more than what branches save."""
        return min(self._most_each, self.count // max(1, num_mirrors))

    def wanting(self, mirrors: Iterable[Mirror], share: int) -> list[tuple[Mirror, BranchKey]]:
        """Drop the branches that others are likelier than, or that are beyond a mirror's share. Return those to begin or to go
        on with, the likeliest first."""
        found: list[tuple[float, Mirror, BranchKey]] = []
        for mirror in mirrors:
            drafted = range(mirror.num_confirmed, min(len(mirror.text), mirror.num_confirmed + self.reach))
            choices = [mirror.choices[index] for index in itertools.takewhile(mirror.choices.__contains__, drafted)]
            best = likeliest(mirror.num_confirmed, choices, mirror.acceptance, share, MIN_CHANCE)
            wanted = {(position, token): chance for chance, position, token in best}
            for key in [key for key in mirror.branches if key not in wanted]:
                self.drop(mirror, key)
            found += [(chance, mirror, key) for key, chance in wanted.items() if self._goes_on(mirror.branches.get(key))]
        found.sort(key=lambda one: -one[0])
        return [(mirror, key) for _, mirror, key in found]

    def table(self, mirror: Mirror, *, at_once: bool) -> list[DraftBranch]:
        """Return the mirror's branches as they are sent, if there is news of them. at_once: any; else the first behind an
        update, and when all are drafted."""
        if not mirror.table_changed or not (at_once or mirror.table_due or self.is_settled(mirror)):
            return []
        mirror.table_changed = mirror.table_due = False
        return [
            DraftBranch(accepted=position - mirror.num_confirmed, tokens=list(branch.tokens))
            for (position, _), branch in mirror.branches.items()
            if len(branch.tokens) > 1
        ]

    def is_settled(self, mirror: Mirror) -> bool:
        """Whether none of its branches is being drafted."""
        return all(self._is_done(branch) for branch in mirror.branches.values())

    def _is_done(self, branch: Branch) -> bool:
        return branch.is_over or len(branch.tokens) > self.length

    def _goes_on(self, branch: Branch | None) -> bool:
        return branch is None or not (branch.is_over or branch.num_tokens > self.length)

    # -- steps

    def rows(self, mirrors: Iterable[Mirror], share: int, max_tokens: int, max_rows: int) -> list[StepRow]:
        """Return the next rows of branches in the step that is planned, of so many tokens and rows at most. A mirror has
        `share` branches at most."""
        chosen: list[tuple[Mirror, BranchKey, int]] = []
        places: list[int] = []
        others = len(self.flights.planning.entries)
        for mirror, key in self.wanting(mirrors, share):
            opened = mirror.branches.get(key)
            count = self.flights.pending(opened) if opened else int(self._may_open(mirror, key[0]))
            if len(chosen) < max_rows and 0 < count <= max_tokens:
                chosen.append((mirror, key, count))
                places.append(opened.air.place - others if opened else -1)
                max_tokens -= count
        rows = [self._row(*chosen[index]) for index in in_places(places)]
        return [row for row in rows if row is not None]

    def _row(self, mirror: Mirror, key: BranchKey, count: int) -> StepRow | None:
        """Return a row with the next `count` tokens of a branch, which is begun if need be; None where there is no room."""
        position, token = key
        opened = mirror.branches.get(key)
        start = opened.begin if opened else position
        end = start + count
        if end >= self.max_context:
            return None
        branch = opened or Branch(mirror, position, [token], self.blocks.borrow(mirror.tables, position), position)
        try:
            self.blocks.cover(branch.tables, start, end)
        except OutOfBlocks:
            return None
        if opened is None:
            mirror.branches[key] = branch
            self._copy_part(branch)
        return StepRow(
            tokens=branch.tokens[start - position :] or [UNKNOWN],
            start=start,
            feed=self.flights.add(branch, end, sampled=True),
            blocks=branch.tables[0],
            more_blocks=branch.tables[1:],
            num_samples=1,
            sampling=mirror.asking,
            prompt_tokens=mirror.prompt_tokens,
        )

    def commit(self, branch: Branch, row: StepRow, samples: RowSamples, choice: Choice | None) -> bool:
        """Take a step's token. Return whether its mirror's table can be sent."""
        if branch.is_over:
            return False
        branch.num_computed = row.start + len(row.tokens)
        if choice is None:
            branch.is_over = True
            return False
        branch.choices.append(choice)
        branch.tokens.append(samples.tokens[0])
        branch.mirror.table_changed = True
        self.num_tokens += 1
        return self.is_settled(branch.mirror)

    def _may_open(self, mirror: Mirror, position: int) -> bool:
        return mirror.num_computed >= position and self.blocks.holds(mirror.tables, position)

    def _copy_part(self, branch: Branch) -> None:
        """Have the step begin with a copy of the mirror's block in which the branch begins, for what stands before it there."""
        index, rest = divmod(branch.position, self.blocks.block_tokens)
        for group, (table, own) in enumerate(zip(branch.mirror.tables, branch.tables, strict=True)):
            if rest and table[index : index + 1] not in ([], [HOLE]):
                self.flights.planning.copies.append(BlockCopy(group, table[index], own[index]))

    # -- ends

    def take(self, mirror: Mirror, position: int, token: int) -> Branch | None:
        """Remove and return the branch that says `token` at `position`, if something has been drafted behind that."""
        branch = mirror.branches.get((position, token))
        if branch is None or len(branch.tokens) < 2:
            return None
        del mirror.branches[(position, token)]
        self.num_taken += 1
        return branch

    def prune(self, mirror: Mirror) -> None:
        """Drop the branches whose place is decided, or whose first token the mirror has drafted itself."""
        for position, token in list(mirror.branches):
            if position < mirror.num_confirmed or mirror.text[position : position + 1] in ([], [token]):
                self.drop(mirror, (position, token))

    def drop(self, mirror: Mirror, key: BranchKey) -> None:
        branch = mirror.branches.pop(key)
        branch.is_closed = True
        self.blocks.release(branch.tables, branch.air.until, behind=branch.position)

    def drop_all(self, mirror: Mirror, start: int = 0) -> None:
        """Drop the mirror's branches from position `start` on."""
        for key in [key for key in mirror.branches if key[0] >= start]:
            self.drop(mirror, key)

    def give_way(self, mirrors: Iterable[Mirror]) -> bool:
        """Drop all branches that no step uses. Return whether there were any."""
        there = [(mirror, key) for mirror in mirrors for key, branch in mirror.branches.items() if not branch.air.num_steps]
        for mirror, key in there:
            self.drop(mirror, key)
        return bool(there)
