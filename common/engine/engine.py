"""What `open_engine` gives a worker: a runner, and the segment that holds its KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.engine.plan import Runner
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from common.transfer.segment import Segment


@dataclass(slots=True)
class Engine:
    """A runner and the segment that holds its KV blocks. `identity`: what its weights are, see `Presence`.
    `files`: the model's; None where nothing is known of its tokenizer."""

    runner: Runner
    segment: Segment
    on_gpu: bool = False
    identity: str = ""
    files: ModelFiles | None = None

    def wiping(self, zero_retention: bool) -> Callable[[int], None] | None:
        """Return what clears a block that nobody holds any more, where nothing may outlive its request; else None.

        :raises ConfigError: KV is in a GPU's memory.
        """
        if not zero_retention:
            return None
        if self.on_gpu:
            raise ConfigError("zero_retention is not supported on GPUs yet: use --device cpu", param="zero_retention")
        blocks = self.segment.blocks

        def wipe(block: int) -> None:
            blocks[block] = 0

        return wipe


OpenEngine = Callable[[str, Callable[[int, int], None]], Engine]
"""`open_engine(segment_name, on_progress)`; blocks (loads weights), called in a thread. `on_progress(done, total)`: bytes."""
