"""What sequences do with the block pools of a cache: reuse a prefix, grow, publish full blocks, let go. Pure.

A group that keeps all of a sequence gives it the blocks of all its known tokens at once. A group with a window or chunks gives
it blocks as its steps need them, and takes back those that no later token reads. So that sequences never wait for each other in
a circle, `open` reserves in such a group what one sequence needs to go on a block at a time.

Blocks that fell out are those that no token from the last full block of computed KV on reads. Steps in flight compute later
tokens, so none of them reads a block that is given back.
"""

from __future__ import annotations

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE, Arrived, GroupedPool
from common.cache.prefix import hash_chain
from common.engine.sequence import Sequence
from common.protocol.errors import OutOfBlocks


class SequenceCache:
    def __init__(self, pool: GroupedPool, *, fingerprint: str) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self.fingerprint = fingerprint
        self.keeps_all = all(group.retention.keeps_all for group in pool.groups)
        self._only = pool.groups[0].pool if self.keeps_all and len(pool.groups) == 1 else None
        self._reserved = [0] * len(pool.groups)
        self._recomputing = set[Sequence]()
        """Open sequences that recompute KV which was copied for them (`copied`)."""

    def longest(self, *, spare: int) -> int:
        """Return the tokens of the longest sequence that the pools hold, beside `spare` blocks that are kept free."""
        return min(kept.longest(pool.num_blocks - spare, self.block_tokens) for pool, kept in self.pool.groups)

    def longest_now(self, *, spare: int) -> int:
        """Return the tokens of the longest sequence for which `check_room` finds blocks."""
        return min(kept.longest(max(0, pool.available - spare), self.block_tokens) for pool, kept in self.pool.groups)

    @property
    def longest_sequence(self) -> int:
        """Tokens that the pools hold for one sequence, beside a block that is kept free."""
        return self.longest(spare=1)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the entries of a block table for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def first_block(self, group: int, num_tokens: int) -> int:
        """Return the index of the first block that a group keeps of `num_tokens` tokens.

        It is what the token behind the last full block reads, or any later one: so a prefix that ends there can be found.
        """
        full = num_tokens // self.block_tokens * self.block_tokens
        return self.pool.groups[group].retention.first_token(full) // self.block_tokens

    def check_room(self, num_tokens: int, *, spare: int, arrived: Arrived = ()) -> None:
        """:raises OutOfBlocks: a group lacks blocks for a sequence of `num_tokens` tokens, with `spare` left.

        arrived: blocks that `open` will be given. Those that are owned for the sequence already need not be there.
        """
        for index, (pool, retention) in enumerate(self.pool.groups):
            needed = retention.blocks_for(num_tokens, self.block_tokens) + spare
            owned = sum(block.is_owned for block in arrived[index].values()) if arrived else 0
            if pool.available + owned < needed:
                raise OutOfBlocks(needed=needed, free=pool.available)

    def hash(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """The hash chain of the full blocks within the first `num_tokens` tokens; extended as the sequence grows."""
        known, full = len(sequence.hashes), num_tokens // self.block_tokens
        if full > known:
            sequence.hashes += hash_chain(
                sequence.tokens[known * self.block_tokens : full * self.block_tokens],
                self.block_tokens,
                fingerprint=self.fingerprint,
                salt=sequence.generation.salt,
                parent=sequence.hashes[-1] if known else b"",
            )
        return sequence.hashes[:full]

    def open(self, sequence: Sequence, num_tokens: int, arrived: Arrived = ()) -> None:
        """Give an empty sequence what it needs to compute `num_tokens` tokens, the first ones from the prefix cache.

        At least one token is left to compute: its logits are needed.

        arrived: blocks behind the cached prefix that are put into the tables. Afterwards it holds those that were; the others
        were cached here meanwhile, or had been set aside and are gone. `copied` must follow where there are any.

        :raises OutOfBlocks: nothing has been taken then.
        """
        cached = self.pool.match([] if sequence.needs_every_state else self.hash(sequence, len(sequence.tokens) - 1))
        num_cached, end = len(cached[0]), self.blocks_for(num_tokens)
        self.pool.retain(cached)
        taken = self._take_back(arrived, num_cached, end)
        try:
            reserved = self._reservation(num_tokens)
            fresh = self.pool.allocate(
                [
                    end - num_cached - len(mine) if group.retention.keeps_all else 0
                    for group, mine in zip(self.pool.groups, taken, strict=True)
                ]
            )
        except BaseException:
            for (pool, _), mine, given in zip(self.pool.groups, taken, arrived, strict=False):
                pool.set_aside([block for index, block in mine.items() if not given[index].is_owned])
            self.pool.release(cached)
            raise
        for given, mine in zip(arrived, taken, strict=False):
            for index in given.keys() - mine.keys() if len(mine) < len(given) else ():
                del given[index]
        sequence.blocks, *sequence.more_blocks = (
            _joined(old, new, mine) for old, new, mine in zip(cached, fresh, taken, strict=True)
        )
        sequence.reserved = reserved
        self._reserved = [sum(both) for both in zip(self._reserved, reserved, strict=True)]
        sequence.computed(num_cached * self.block_tokens)
        sequence.num_published = num_cached
        if sequence.num_cached < 0:
            sequence.num_cached = min(sequence.num_computed, sequence.generation.prompt_tokens)

    def catch_up(self, sequence: Sequence) -> None:
        """Take over what others have computed of a prompt since `open`: many that share a prefix then have little left."""
        if sequence.num_steps or not self._shares(sequence):
            return
        hashes, first = self.hash(sequence, len(sequence.tokens) - 1), sequence.num_planned // self.block_tokens
        if first >= len(hashes):
            return
        found = self.pool.match(hashes, sequence.tables, first)
        end = len(found[0])
        if not end:
            return
        for index, (group, table) in enumerate(zip(self.pool.groups, sequence.tables, strict=True)):
            begin = max(first, self.first_block(index, end * self.block_tokens))
            table += [HOLE] * (end - len(table))
            group.pool.retain(found[index][begin:end])
            group.pool.release([block for block in table[begin:end] if block != HOLE])
            table[begin:end] = found[index][begin:end]
        sequence.num_cached += end * self.block_tokens - sequence.num_computed
        sequence.num_published = max(sequence.num_published, end)
        self.copied(sequence, end * self.block_tokens)

    def claim(self, sequence: Sequence, num_tokens: int, computing: set[bytes]) -> bool:
        """Before a step computes the next `num_tokens` of a prompt: name the blocks that it will fill.

        `computing` holds the hashes of the blocks that the step, or one in flight, computes already. False: the sequence's next
        block is one of them, and waiting for the next step saves computing it twice.
        """
        hashes = self._missing(sequence)
        if hashes and hashes[0] in computing:
            return False
        computing.update(hashes[: (sequence.num_planned % self.block_tokens + num_tokens) // self.block_tokens])
        return True

    def cover(self, sequence: Sequence, num_tokens: int) -> int:
        """Before a step computes the next `num_tokens` of a prompt: take blocks in the groups that give them step by step.

        Return how many of the tokens have blocks now: fewer where a group has too few, 0 where it has none.
        """
        if self.keeps_all:
            return num_tokens
        start, end = sequence.num_planned, sequence.num_planned + num_tokens
        for group, table in zip(self.pool.groups, sequence.tables, strict=True):
            lacking = self._lacking(table, start, end)
            if len(lacking) > group.pool.available:
                end = lacking[group.pool.available] * self.block_tokens
        if end <= start:
            return 0
        self.grow(sequence, end)
        return end - start

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for all tokens below `num_tokens` that are not planned yet.

        :raises OutOfBlocks: nothing has been taken then.
        """
        if self._only is not None:  # for each sequence of each step
            missing = self.blocks_for(num_tokens) - len(sequence.blocks)
            if missing > 0:
                sequence.blocks += self._only.allocate(missing)
            return
        self._fill(sequence, [self._lacking(table, sequence.num_planned, num_tokens) for table in sequence.tables])

    def reach(self, sequence: Sequence, num_tokens: int) -> None:
        """Before KV of the first `num_tokens` tokens is copied in: give the sequence the blocks that each group keeps of them.
        `copied` must follow.

        :raises OutOfBlocks: nothing has been taken then.
        """
        firsts = [self.first_block(index, num_tokens) * self.block_tokens for index in range(len(self.pool.groups))]
        self._fill(
            sequence, [self._lacking(table, first, num_tokens) for table, first in zip(sequence.tables, firsts, strict=True)]
        )

    def copied(self, sequence: Sequence, num_tokens: int, *, recompute: int = 0) -> None:
        """KV of the first `num_tokens` tokens is there, if not more of it was there before; no step is in flight.

        recompute: how many of the sequence's last tokens are computed all the same, in blocks that no other sequence has yet.
        It does not take over these blocks from others meanwhile. Ignored where a group keeps a window or a chunk: what those
        tokens read was not copied.
        """
        if recompute and self.keeps_all and num_tokens > (begin := len(sequence.tokens) - recompute):
            num_tokens = begin
            self._recomputing.add(sequence)
        sequence.computed(max(sequence.num_computed, num_tokens))
        end = self.blocks_for(sequence.num_computed)
        for index, (group, table) in enumerate(zip(self.pool.groups, sequence.tables, strict=True)):
            if not group.retention.keeps_all:
                begin = self.first_block(index, sequence.num_computed)
                group.pool.release([block for block in (*table[:begin], *table[end:]) if block != HOLE])
                table[end:] = []
                table[:begin] = [HOLE] * begin

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of computed KV findable by their content, and let go of those that no later token reads."""
        full = sequence.num_computed // self.block_tokens
        if full > sequence.num_published:
            hashes = self.hash(sequence, sequence.num_computed)
            for (pool, _), table in zip(self.pool.groups, sequence.tables, strict=True):
                news = zip(table[sequence.num_published : full], hashes[sequence.num_published :], strict=True)
                pool.publish_all([(block, block_hash) for block, block_hash in news if block != HOLE])
            sequence.num_published = full
        if not self.keeps_all:
            self._let_go(sequence)

    def close(self, sequence: Sequence) -> None:
        """Let go of every block. Harmless twice."""
        tables, sequence.blocks, sequence.more_blocks = sequence.tables, BlockTable(), []
        reserved, sequence.reserved = sequence.reserved, []
        if reserved:
            self.pool.release(tables)
            self._reserved = [total - mine for total, mine in zip(self._reserved, reserved, strict=True)]
        self._recomputing.discard(sequence)
        sequence.num_computed = sequence.num_planned = sequence.num_published = 0
        sequence.total = None

    def check(self) -> None:
        """:raises AssertionError: a pool's counters are wrong, or more is reserved than there is."""
        self.pool.check()
        for group, reserved in zip(self.pool.groups, self._reserved, strict=True):
            assert 0 <= reserved <= group.pool.num_blocks, "more blocks are reserved than there are"
        assert all(sequence.blocks for sequence in self._recomputing), "a sequence without blocks recomputes KV"

    def _take_back(self, arrived: Arrived, begin: int, end: int) -> list[dict[int, int]]:
        """Return, for each group, the blocks at [begin, end) of its table that are the sequence's from now on."""
        if not arrived:
            return [{} for _ in self.pool.groups]
        return [pool.take_back_all(blocks, begin, end) for (pool, _), blocks in zip(self.pool.groups, arrived, strict=True)]

    def _missing(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the prompt's full blocks that are not wholly planned; none where they can't be shared."""
        if not self._shares(sequence):
            return []
        return self.hash(sequence, len(sequence.tokens) - 1)[sequence.num_planned // self.block_tokens :]

    def _shares(self, sequence: Sequence) -> bool:
        return self.pool.keeps_content and not sequence.needs_every_state and sequence not in self._recomputing

    def _reservation(self, num_tokens: int) -> list[int]:
        """Return the blocks to reserve in each group; 0 where they are taken at once.

        :raises OutOfBlocks: a group has promised all it has.
        """
        wanted = []
        for (pool, retention), reserved in zip(self.pool.groups, self._reserved, strict=True):
            wanted.append(0 if retention.keeps_all else retention.blocks_for(num_tokens, self.block_tokens))
            if reserved + wanted[-1] > pool.num_blocks:
                raise OutOfBlocks(needed=wanted[-1], free=pool.num_blocks - reserved)
        return wanted

    def _lacking(self, table: list[int], start: int, end: int) -> list[int]:
        """Return the indices of the blocks of tokens [start, end) that a table does not have."""
        first, stop = start // self.block_tokens, self.blocks_for(end)
        held = table[first:stop]
        holes = [index for index, block in enumerate(held, first) if block == HOLE] if HOLE in held else []
        return [*holes, *range(max(first, len(table)), stop)]

    def _fill(self, sequence: Sequence, lacking: list[list[int]]) -> None:
        """:raises OutOfBlocks: nothing has been taken then."""
        fresh = self.pool.allocate([len(indices) for indices in lacking])
        for table, indices, blocks in zip(sequence.tables, lacking, fresh, strict=True):
            if indices:
                table += [HOLE] * (indices[-1] + 1 - len(table))
            for index, block in zip(indices, blocks, strict=True):
                table[index] = block

    def _let_go(self, sequence: Sequence) -> None:
        """Give back the blocks that fell out: in a table, holes come first, then what is held."""
        for index, (group, table) in enumerate(zip(self.pool.groups, sequence.tables, strict=True)):
            end = begin = min(self.first_block(index, sequence.num_computed), len(table))
            while begin and table[begin - 1] != HOLE:
                begin -= 1
            if begin < end and not group.retention.keeps_all:
                group.pool.release(table[begin:end])
                table.let_go(begin, end)


def _joined(cached: list[int], fresh: list[int], arrived: dict[int, int]) -> BlockTable:
    """Return a table of `cached` blocks, then `arrived` ones at their indices, and `fresh` ones, or holes, at all others."""
    if not arrived:
        return BlockTable(cached + fresh)
    others, first = iter(fresh), len(cached)
    end = max(first + len(fresh) + len(arrived) if fresh else 0, max(arrived) + 1)
    return BlockTable(cached + [arrived[i] if i in arrived else next(others, HOLE) for i in range(first, end)])
