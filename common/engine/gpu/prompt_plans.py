"""What computes prompts on this card: our kernel for Hopper, or libraries, run once before the first prompt.

Libraries plan each shape, and may refuse some on some cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from common.models.decoder import Decoder
from common.ops import backend
from common.ops.attention.configs import has_parts, has_ragged
from common.ops.attention.form import AttentionForm, FormKind
from common.ops.attention.parts import attend_part, planned_parts
from common.ops.attention.prefill import attend_run, planned_lengths, ragged_is_right
from common.ops.attention.prompt import prompts_are_right, takes_prompts
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import FreshRun
from common.runtime import logs

log = logs.get("engine")


def forms_of(decoder: Decoder, layers: Iterable[int]) -> dict[FormKind, AttentionForm]:
    """Return a form of each kind among some layers."""
    forms = [decoder.layers[layer].mixer.form for layer in layers]
    return {form.kind: form for form in forms}


def with_prompt_kernel(settings: AttentionSettings, decoder: Decoder) -> AttentionSettings:
    """Return the settings with the prompt kernel in cuDNN's place, where the card has what it needs and it computes what it
    should for one of the decoder's kinds of layers."""
    config, dtype, device = decoder.config, decoder.dtype, decoder.device
    forms = forms_of(decoder, range(len(decoder.layers)))
    forms = {kind: form for kind, form in forms.items() if takes_prompts(config.head_dim, dtype, kind)}
    hopper = backend.has_warpgroup_products(device)
    if settings.prefill_backend != "cudnn" or settings.batch_invariant or not forms or not hopper:
        return settings

    def check() -> None:
        for form in forms.values():
            try:
                is_right = prompts_are_right(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device, form)
            except RuntimeError:
                raise
            except Exception as error:  # a Triton whose Gluon is another one: the kernel is left out, not the worker
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            if not is_right:
                raise RuntimeError("other numbers than the reference's")

    return settings if _refused("prompt_kernel", check) else replace(settings, prefill_backend="hopper")


def run_prompts(
    settings: AttentionSettings, decoder: Decoder, scale: float, longest: int, max_context: int
) -> AttentionSettings:
    """Run attention of prompts of up to `longest` tokens on this thread, in each shape that cuDNN will get.

    scale: of the scores. Returns the settings without what the card refuses, or computes wrongly.

    :raises torch.OutOfMemoryError: if a prompt of `longest` tokens does not fit. :raises RuntimeError: if the GPU no longer
        answers.
    """
    config, dtype = decoder.config, decoder.dtype
    if settings.prefill_backend != "cudnn":
        return settings
    if dtype == torch.float32:  # which cuDNN and FlashAttention refuse
        return settings

    def zeros(length: int, heads: int) -> torch.Tensor:
        return torch.zeros(length, heads, config.head_dim, dtype=dtype, device=decoder.device)

    def qkv(length: int, keys: int) -> list[torch.Tensor]:
        return [zeros(length, config.num_heads), zeros(keys, config.num_kv_heads), zeros(keys, config.num_kv_heads)]

    def check_ragged() -> None:
        if not ragged_is_right(config.num_heads, config.num_kv_heads, config.head_dim, dtype, decoder.device):
            raise RuntimeError("other numbers than the reference's")

    def run_parts() -> None:
        for queries, keys, causal in planned_parts(longest, max_context, settings):
            query, key, value = qkv(queries, keys)
            attend_part(query, key, value, scale, causal=causal)

    if settings.ragged_max and has_ragged(config.head_dim, dtype) and _refused("attention_of_ragged_prompts", check_ragged):
        settings = replace(settings, ragged_max=0)
    for length in planned_lengths(longest, settings):
        query, key, value = qkv(length, length)
        attend_run(query, key, value, FreshRun(0, 1, length), settings, scale)
    if has_parts(config.head_dim, dtype) and _refused("attention_in_parts", run_parts):
        settings = replace(settings, part_min_prefix=None)
    return settings


def _refused(what: str, run: Callable[[], None]) -> bool:
    """An old card, or torch without a library: there the kernel that reads pages does it."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not backend.gpu_answers():
            raise
        log.warning(f"{what}_refused", error=str(error)[:300])
        return True
    return False
