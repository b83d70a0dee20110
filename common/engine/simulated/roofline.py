"""How long a step or a KV transfer takes on a named accelerator and model, by bytes and operations.

    step = max(weights / HBM bandwidth, FLOPs of linears / peak)
           + KV read / HBM bandwidth + FLOPs of attention / peak + fixed overhead
    link = fixed latency + KV bytes / link bandwidth

Linears read weights while they multiply. Attention follows them, and what rows read and what a part of a prompt multiplies do
not overlap: twelve rows of 8,192 tokens and a part of 500 take 17 to 18.7 ms on an H200, by this 17.3.

`simulated.py` sleeps for these times. The figures are achieved ones (80-95% of the datasheet), not peaks.
"""

from __future__ import annotations

import difflib

import msgspec

from common.protocol.errors import ConfigError


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator serving one model. Zero bandwidth means "takes no time" (`instant`).

    `weight_bytes` is what one step reads (the input embedding left out); `pair_flops` are the FLOPs of one query token
    attending to one key over all layers (4 · layers · heads · head_dim).
    """

    name: str
    hbm_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    weight_bytes: float = 0.0
    params: float = 0.0
    kv_bytes_per_token: float = 0.0
    pair_flops: float = 0.0
    step_overhead_s: float = 0.0
    link_overhead_s: float = 0.0

    def step_s(self, *, num_tokens: int, kv_tokens: int, pairs: int) -> float:
        """Seconds of a step of `num_tokens` inputs that reads `kv_tokens` positions of KV and scores `pairs` (query, key)."""
        if not num_tokens:
            return 0.0
        linears_s = max(
            _divide(self.weight_bytes, self.hbm_bytes_per_s), _divide(2.0 * self.params * num_tokens, self.flops_per_s)
        )
        kv_s = _divide(self.kv_bytes_per_token * kv_tokens, self.hbm_bytes_per_s)
        return linears_s + kv_s + _divide(self.pair_flops * pairs, self.flops_per_s) + self.step_overhead_s

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds to move the KV of `num_tokens` positions over the link."""
        return self.link_overhead_s + _divide(self.kv_bytes_per_token * num_tokens, self.link_bytes_per_s)


def _divide(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="instant"),
        # 32 layers, 32/8 heads of 128, bf16; measured on one H200: 4.0 TB/s, 670 TFLOP/s, 394 GB/s between two of a host
        Profile(
            name="h200-llama-8b",
            hbm_bytes_per_s=4.0e12,
            flops_per_s=670e12,
            link_bytes_per_s=394e9,
            weight_bytes=15.0e9,
            params=7.5e9,
            kv_bytes_per_token=131_072,
            pair_flops=524_288,
            step_overhead_s=0.9e-3,
            link_overhead_s=50e-6,
        ),
        # 80 layers, 64/8 heads of 128, bf16; 85% of 8 TB/s, 70% of 2.25 PFLOP/s, 85% of NVLink 5's 900 GB/s
        Profile(
            name="b200-llama-70b",
            hbm_bytes_per_s=6.8e12,
            flops_per_s=1.58e15,
            link_bytes_per_s=765e9,
            weight_bytes=139e9,
            params=69.5e9,
            kv_bytes_per_token=327_680,
            pair_flops=2_621_440,
            step_overhead_s=1.5e-3,
            link_overhead_s=50e-6,
        ),
    )
}


def profile(name: str) -> Profile:
    """:raises ConfigError: for a name that isn't in `PROFILES`, naming the nearest one that is."""
    found = PROFILES.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PROFILES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(PROFILES)}"
        raise ConfigError(f"no simulated profile {name!r}; {hint}", param="profile")
    return found
