"""What a runner decides about its attention on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from common.ops.attention.configs import PrefillBackend


@dataclass(slots=True, frozen=True)
class AttentionSettings:
    """What a runner decides about its attention.

    prefill_backend: for prompts; "hopper" is the kernel in `prompt`, "kernel" the one that reads pages. With another than
        "kernel", prompts' K and V must come as tensors. A runner takes "hopper" in place of "cudnn" on a card that it is for.
    fresh_prefill_min: shorter prompts stay with the kernel: they share its launch with the other rows.
    long_prompt_min: from here on cuDNN has one prompt a call, padded to one of a few lengths; below, FlashAttention-2 takes its
        place. cuDNN plans every shape that is new to a thread, for 0.1 s and more (pytorch#154602).
    ragged_max: up to here prompts of different lengths that lie side by side are one call of FlashAttention-2; 0: never.
    part_min_prefix: a prompt that goes on after so many keys, by long_prompt_min tokens or more, is cuDNN's as well (`parts`);
        None: never.
    chunk_min: "hopper" computes a prompt that goes on after a prefix from so many tokens on: copying the prefix out of the
        pool takes as long as what the kernel saves for some 250 tokens.
    max_prefix: of such a prompt, in keys, since the copy takes memory. Steps with a longer one leave all of them to the kernel
        that reads pages.
    min_piece, max_piece: of a prefix in parts, in keys: over the shortest cuDNN is a tenth faster than the kernel, over more
        than the longest no faster.
    is_even: see `Cut`.
    batch_invariant: a query is computed in the same way whatever rows come with it, at a cost: all goes through the kernel that
        reads pages.
    """

    prefill_backend: PrefillBackend = "cudnn"
    fresh_prefill_min: int = 64
    long_prompt_min: int = 1024
    ragged_max: int = 1023
    part_min_prefix: int | None = 2048
    chunk_min: int = 256
    max_prefix: int = 131072
    min_piece: int = 1024
    max_piece: int = 16384
    is_even: bool = True
    batch_invariant: bool = False

    def suits_parts(self, row_length: int, start: int) -> bool:
        """Return whether a row of so many tokens after so many keys is computed apart from the list: in `parts`, or by
        `prompt`."""
        if self.prefill_backend == "hopper":
            return row_length >= self.chunk_min and start > 0
        return self.part_min_prefix is not None and row_length >= self.long_prompt_min and start >= self.part_min_prefix


DEFAULT_SETTINGS = AttentionSettings()
