"""What a runner decides about its attention on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from common.ops.attention.configs import PrefillBackend


@dataclass(slots=True, frozen=True)
class AttentionSettings:
    """What a runner decides about its attention.

    prefill_backend: for prompts without a cached prefix; "kernel" is the one that reads pages. With another, prompts' K and V
        must come as tensors. Causal, 8k, 32/8 heads × 128 on an H200: cuDNN 590 TFLOP/s, FlashAttention-2 289.
    fresh_prefill_min: shorter prompts stay with the kernel: they share its launch with the other rows.
    long_prompt_min: from here on cuDNN has one prompt a call, padded to one of a few lengths; below, FlashAttention-2 takes its
        place. cuDNN plans every shape that is new to a thread, for 0.1 s and more (pytorch#154602).
    ragged_max: up to here prompts of different lengths that lie side by side are one call of FlashAttention-2; 0: never.
    part_min_prefix: a prompt that goes on after so many keys, by long_prompt_min tokens or more, is cuDNN's as well (`parts`);
        None: never.
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
    min_piece: int = 1024
    max_piece: int = 16384
    is_even: bool = True
    batch_invariant: bool = False

    def suits_parts(self, row_length: int, start: int) -> bool:
        """Return whether a row of so many tokens after so many keys is long enough for `parts`."""
        return self.part_min_prefix is not None and row_length >= self.long_prompt_min and start >= self.part_min_prefix


DEFAULT_SETTINGS = AttentionSettings()
