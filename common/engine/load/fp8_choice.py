"""Which linears of a model may be FP8, and where its keys are centred: measured on text when it is first loaded, and kept.

e4m3 has three bits of mantissa. That costs a large model next to nothing and a small one several per cent of its perplexity,
much of it in a few linears. So what FP8 costs is measured, as the mean KL divergence of the next token from the model as the
files hold it. `quantization_max_loss` is for all of it. Where weights in FP8 cost more than an FP8 KV pool leaves of it, each
linear is measured alone, and those that cost least for the bytes that they save are FP8, until their costs, which add up,
reach the limit. The head is one more such linear, the first to be left alone where all of it costs too much. In bfloat16 any
change at all tips other roundings everywhere, a divergence that does not add up: what a last bit of the embedding does is
subtracted.

The keys' centre (see `ops.kv.qkv_rope`) is their mean over the same text, at all positions up to `CENTERED_POSITIONS`: what no
position turns away is what all of them share.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from common.engine.load.causal import Causal, centered
from common.engine.load.sample_text import SAMPLE_TEXT
from common.models.config import ModelConfig
from common.models.decoder import Decoder, Inputs, LinearPlace, modules
from common.ops.kept import cache_directory, write_atomically
from common.ops.tuning import device_name, exclusive
from common.runtime import logs

log = logs.get("engine")

ROW_TOKENS = 512
_VERSION = 4
_CHUNK = 256


class Fp8Choice(msgspec.Struct, frozen=True, kw_only=True):
    """plain: modules whose weights are not quantised, by their names in the files. share: of the layers' weights that are.
    head: whether the head is FP8.

    kv_loss, loss, full_loss: nats a token that FP8 costs, beside the `floor` of any change: the KV pool alone, the linears as
    chosen, and all of them, head included. head_loss: what the head alone costs; 0 where it was not measured by itself.
    k_center: float32 [layers, kv_heads, head_dim], its bytes.
    head_read_bytes, head_memory_bytes: what an FP8 head saves of what a step reads, and of the weights' memory: below 0 where
    the embedding is the same tensor, and stays.
    """

    plain: list[str]
    share: float
    kv_loss: float
    loss: float
    full_loss: float
    floor: float
    k_center: bytes
    head: bool = False
    head_loss: float = 0.0
    head_read_bytes: int = 0
    head_memory_bytes: int = 0

    def digest(self) -> str:
        """Return a name of what was chosen: engines that chose otherwise compute other KV, or store it about another centre.

        No KV depends on the head, so it is not in the name.
        """
        return hashlib.blake2b(msgspec.json.encode((self.plain, self.k_center)), digest_size=8).hexdigest()

    def center(self, config: ModelConfig, device: torch.device) -> torch.Tensor:
        """float32 [layers, kv_heads, head_dim] on `device`."""
        numbers = np.frombuffer(self.k_center, np.float32).copy()
        return torch.from_numpy(numbers).view(config.num_layers, config.num_kv_heads, config.head_dim).to(device)


def known_or_measured(
    name: str,
    device: torch.device,
    tokens: Callable[[], list[int]],
    load: Callable[[], tuple[Decoder, Decoder | None]],
    max_loss: float,
    *,
    kv: bool,
) -> Fp8Choice:
    """The choice that is on disk, or `measure` of what `load` loads. name: of the model and its precision.

    One process measures at a time. tokens(): of `SAMPLE_TEXT`.
    """
    digest = hashlib.blake2b(f"{_VERSION}/{name}/{max_loss}/{kv}/{SAMPLE_TEXT}".encode(), digest_size=8).hexdigest()
    path = cache_directory() / f"fp8-{device_name(device)}-{digest}.json"
    if (found := _read(path)) is not None:
        return found
    with exclusive("fp8"):
        if (found := _read(path)) is not None:
            return found
        begun = time.perf_counter()
        plain, quantised = load()
        found = measure(plain, quantised, tokens(), max_loss, kv=kv)
        log.info(
            "fp8_measured",
            share=round(found.share, 3),
            kv_loss=round(found.kv_loss, 5),
            loss=round(found.loss, 5),
            full_loss=round(found.full_loss, 5),
            head=found.head,
            head_loss=round(found.head_loss, 5),
            head_read_saved_mb=round(found.head_read_bytes / 1e6, 1),
            head_memory_saved_mb=round(found.head_memory_bytes / 1e6, 1),
            seconds=round(time.perf_counter() - begun, 1),
        )
        write_atomically(path, msgspec.json.encode(found))
    return found


def _read(path: Path) -> Fp8Choice | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Fp8Choice)
    except (OSError, msgspec.MsgspecError):
        return None


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def measure(plain: Decoder, quantised: Decoder | None, tokens: list[int], max_loss: float, *, kv: bool) -> Fp8Choice:
    """plain: the model as its files hold it; quantised: with FP8 linears and head, or None, if they stay as they are. max_loss:
    nats a token; 0: any. kv: is the pool FP8, too?
    """
    config = plain.config
    rows = -(-len(tokens) // min(ROW_TOKENS, config.max_context))
    length = len(tokens) // rows
    text = torch.tensor(tokens[: rows * length], device=plain.device).view(-1, length)
    keys = torch.zeros(config.num_layers, config.num_kv_heads, config.head_dim, device=plain.device)
    reference = _logits(plain, Causal(plain, length, keys=keys), text)
    center = centered(keys / text.numel(), plain)

    def loss(decoder: Decoder, pool_center: torch.Tensor | None = None) -> float:
        return _loss(reference, decoder, Causal(decoder, length, center=pool_center), text)

    floor = loss(_nudged(plain))
    kv_loss = loss(plain, center) - floor if kv else 0.0
    head: LinearPlace = (config.num_layers, "head")
    layers: list[LinearPlace] = []
    if quantised is not None:
        layers = [(index, role) for index, layer in enumerate(quantised.layers) for role in layer.linears]
    sizes: dict[LinearPlace, int] = {(layer, role): plain.layers[layer].linears[role].parameters for layer, role in layers}
    everything = [*layers, head] if quantised is not None and quantised.head.format == "fp8" else layers
    sizes[head] = plain.head.parameters

    def weights_loss(chosen: Collection[LinearPlace]) -> float:
        return loss(plain.with_linears(quantised, chosen)) - floor if quantised is not None and chosen else 0.0

    chosen = everything
    found = full_loss = weights_loss(everything)
    left, costs = max_loss - max(0.0, kv_loss), dict[LinearPlace, float]()
    if max_loss and found > left and head in everything:
        chosen, found = layers, weights_loss(layers)
    if max_loss and found > left:
        costs = {place: weights_loss([place]) for place in everything}
        chosen = _affordable(costs, sizes, left)
        while (found := weights_loss(chosen)) > max(0.0, left):  # costs add up, but for chance
            chosen.pop()
    elif head in everything:
        costs[head] = weights_loss([head])
    others = sorted(set(layers) - set(chosen))
    saved = (plain.dtype.itemsize - 1) * sizes[head]
    return Fp8Choice(
        plain=[module for place in others for module in modules(config, place)],
        share=sum(sizes[place] for place in layers if place in chosen) / max(1, sum(sizes[place] for place in layers)),
        kv_loss=kv_loss,
        loss=found,
        full_loss=full_loss,
        floor=floor,
        k_center=center.cpu().numpy().tobytes(),
        head=head in chosen,
        head_loss=costs.get(head, 0.0),
        head_read_bytes=saved,
        head_memory_bytes=-sizes[head] if config.tie_embeddings else saved,
    )


def _affordable(costs: dict[LinearPlace, float], sizes: dict[LinearPlace, int], max_loss: float) -> list[LinearPlace]:
    """The cheapest for their sizes, cheapest first, whose costs stay within `max_loss` together."""
    chosen: list[LinearPlace] = []
    for place in sorted(costs, key=lambda place: costs[place] / sizes[place]):
        if costs[place] <= max_loss:
            chosen.append(place)
            max_loss -= max(0.0, costs[place])
    return chosen


def _loss(reference: torch.Tensor, decoder: Decoder, attention: Causal, text: torch.Tensor) -> float:
    """Mean KL divergence of `decoder`'s logits from the reference's, nats; a few rows of its own are in memory at once."""
    states = decoder.states(Inputs(text.flatten(), None, attention))
    parts = zip(reference.split(_CHUNK), states.split(_CHUNK), strict=True)
    return sum(len(part) * _divergence(wanted, decoder.logits(part)) for wanted, part in parts) / len(reference)


def _logits(decoder: Decoder, attention: Causal, text: torch.Tensor) -> torch.Tensor:
    """text: int64 [rows, tokens]. Returns [rows · tokens, vocab_size]."""
    return decoder.forward(Inputs(text.flatten(), None, attention))


def _nudged(decoder: Decoder) -> Decoder:
    """With the embedding's last bits up or down."""
    embedding, step = decoder.embedding, torch.finfo(decoder.dtype).eps
    generator = torch.Generator(decoder.device).manual_seed(0)
    up = torch.randint(0, 2, embedding.shape, generator=generator, dtype=torch.uint8, device=decoder.device)
    nudged = copy.copy(decoder)
    nudged.embedding = torch.where(up > 0, embedding * (1 + step), embedding * (1 - step))
    return nudged


def _divergence(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL divergence of [tokens, vocab_size] logits from the reference's, nats."""
    total = 0.0
    for wanted, found in zip(reference.split(_CHUNK), logits.split(_CHUNK), strict=True):
        expected, given = wanted.float().log_softmax(-1), found.float().log_softmax(-1)
        total += F.kl_div(given, expected, reduction="sum", log_target=True).item()
    return total / len(reference)
