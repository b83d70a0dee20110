"""Named tensors from a model's files, or made up, and the loader that hands each of them out once, on the device.

Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the format. A tensor that is missing, has another
shape, or that the model has no use for is an error: half-right weights would still generate text.

FP8 checkpoints hold a `.weight` in float8 and beside it its scale (see `fp8`); other formats have several tensors for each
module (see `common/models/formats`). Who takes such a weight as a tensor gets it dequantised; `take_linear` keeps it as it is
where the engine has a kernel for it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Literal

import torch

from common.models.formats.companions import is_companion
from common.models.formats.groups import Groups
from common.models.formats.registry import format_of
from common.models.formats.scheme import WeightScheme
from common.models.weights.fp8 import Fp8Weight, dequantise_fp8, find_scale, fused_fp8, kv_scales
from common.models.weights.prefetch import Prefetch
from common.models.weights.required import not_floats, refuse_others
from common.models.weights.source import Progress, WeightsError, WeightSource
from common.models.weights.upload import Upload
from common.ops.linear.weight import LinearWeight, linear_from_grouped, pack_linear
from common.ops.quant.grouped import join_grouped

MAX_THREADS = 8
"""That read ahead. Candidates, and how they compare: `python -m bench.load`."""

LinearFormat = Literal["none", "int8", "fp8", "groups"]


class WeightLoader:
    """Takes tensors out of `source`, in `dtype` on `device`, and at the end complains about what nobody took.

    `weights`: what `take_linear` makes of the linears. On a GPU threads read ahead in the order in which a decoder takes;
    close the loader (it is a context manager) to end them.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        on_progress: Progress | None = None,
        *,
        device: torch.device | None = None,
        weights: LinearFormat = "none",
        plain: Collection[str] = (),
        fp8_head: bool = False,
        scheme: WeightScheme | None = None,
        batch_invariant: bool = False,
        threads: int = -1,
    ) -> None:
        """`plain`: modules that are not quantised. `fp8_head`: the head is FP8 where `weights` are, or are in groups.
        `scheme`: how the files hold the others; None: as floats. `batch_invariant`: see `LinearWeight`.

        `threads` that read ahead; -1: as many as suit `device`."""
        self.source = source
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.weights: LinearFormat = weights
        self.batch_invariant = batch_invariant
        self._plain_modules = frozenset(plain)
        self._fp8_head = fp8_head
        self._scheme = scheme or WeightScheme()
        self._format = format_of(self._scheme, source.shapes)
        self._on_progress = on_progress or (lambda done, total: None)
        self._left = {name for name in source.shapes if not is_companion(name)}
        self._total = sum(source.size_bytes(name) for name in source.shapes)
        self._done = self._total - sum(source.size_bytes(name) for name in self._left)
        if threads < 0:
            threads = min(MAX_THREADS, len(os.sched_getaffinity(0))) if self.device.type == "cuda" else 0
        ahead = self._left.difference(source.groups) if weights == "groups" else self._left
        self._prefetch = Prefetch(source, Upload(self.device, dtype), ahead, threads=threads)

    def __enter__(self) -> WeightLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._prefetch.close()

    def has(self, name: str) -> bool:
        return name in self.source.shapes

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`name` as a tensor of `shape`, in `dtype` (the loader's) on `device`.

        :raises WeightsError: if it is missing, has another shape, or is integers.
        """
        module = name.removesuffix(".weight")
        if self._format is not None and len(shape) == 2 and module != name and self._in_groups(module):
            return self._groups(module, *shape).dequantise().to(dtype or self.dtype)
        return self._plain(name, self._take(name, shape), dtype or self.dtype)

    def take_stored(self, module: str, size: int, inputs: int) -> Groups | Fp8Weight | torch.Tensor:
        """The weight [size, inputs] of `module` (a name without `.weight`) as the files hold it; floats in `dtype`.

        :raises WeightsError: if tensors are missing or have another shape.
        """
        if self._in_groups(module):
            found = self._groups(module, size, inputs)
            if self.has(f"{module}.bias"):
                self._skip_zeros(f"{module}.bias")
            return found
        name = f"{module}.weight"
        tensor = self._take(name, (size, inputs))
        if tensor.dtype == torch.float8_e4m3fn:
            return Fp8Weight(tensor, self._scale(name, tensor), self.dtype)
        return self._plain(name, tensor, self.dtype)

    def take_codes(self, name: str, *shape: int) -> torch.Tensor:
        """`name` on the device, in the dtype of the files.

        :raises WeightsError: if it is missing or has another shape.
        """
        return self._take(name, shape)

    @property
    def keeps_quantised(self) -> bool:
        """Whether weights that the files hold in 4 or 8 bits are multiplied as such."""
        return self.weights in ("groups", "fp8")

    def take_linear(self, outputs: Mapping[str, int], inputs: int, bias: bool) -> LinearWeight:
        """One weight of the modules in `outputs` (name without `.weight` → output features), below each other, packed.

        :raises WeightsError: if a part is missing or has another shape.
        """
        if any(self._in_groups(name) for name in outputs):
            return self._take_groups(outputs, inputs, bias)
        parts = {name: self._take(f"{name}.weight", (size, inputs)) for name, size in outputs.items()}
        fused_bias = self._take_bias(outputs) if bias else None
        if self.weights == "fp8" and all(part.dtype == torch.float8_e4m3fn for part in parts.values()):
            scales = [self._scale(f"{name}.weight", part) for name, part in parts.items()]
            if fused := fused_fp8(list(parts.values()), scales, fused_bias, self.dtype, batch_invariant=self.batch_invariant):
                return fused
        weight = self._joined(parts)
        left_alone = not self._plain_modules.isdisjoint(outputs) or (self.weights == "fp8" and self.source.holds_fp8)
        return self._packed(weight, fused_bias, plain=left_alone)

    def pack_head(self, weight: torch.Tensor) -> LinearWeight:
        """The lm_head: as the linears on a CPU, where it is a fifth of a small model's bytes; FP8 where that was asked for."""
        if self.weights in ("fp8", "groups") and self._fp8_head:
            return pack_linear(weight, format="fp8", batch_invariant=self.batch_invariant)
        format = "int8" if self.weights == "int8" else "plain"
        return pack_linear(weight, format=format, batch_invariant=self.batch_invariant)

    def pack_plain(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
        """A linear that is never quantised. weight: [out, in]; bias: [out] or None."""
        return self._packed(weight, bias, plain=True)

    def take_kv_scales(self, num_layers: int, num_kv_heads: int) -> torch.Tensor | None:
        """Scales of an FP8 KV cache, float32 [num_layers, 2, num_kv_heads] (K, V), if the files have some: stored = value /
        scale.

        :raises WeightsError: if they are not one, or one per KV head.
        """
        return kv_scales(self.source, self._prefetch.upload, num_layers, num_kv_heads)

    def skip(self, name: str) -> None:
        """`name` is known and not needed."""
        if name in self._left:
            self._left.discard(name)
            self._prefetch.discard(name)
            self._done += self.source.size_bytes(name)
            self._on_progress(self._done, self._total)

    def finish(self) -> None:
        """:raises WeightsError: if tensors are left over."""
        self._prefetch.close()
        refuse_others(self._left)

    def _in_groups(self, module: str) -> bool:
        """Whether `module`'s weight has scales for groups, by the files and by what the configuration leaves alone."""
        if f"{module}.weight" in self.source.groups:
            return self.weights == "groups"
        if self._format is None or self._scheme.leaves_alone(module):
            return False
        main = self._format.main(module)
        return main in self.source.shapes and (main != f"{module}.weight" or f"{main}_scale" in self.source.shapes)

    def _groups(self, module: str, size: int, inputs: int) -> Groups:
        """:raises WeightsError: see `GroupFormat.load`."""
        weight = f"{module}.weight"
        if weight in self.source.groups:
            found = self.source.read_groups(weight, self._prefetch.upload)
            if tuple(found.codes.shape) != (size, inputs):
                raise WeightsError(f"{weight} has shape {list(found.codes.shape)}, the configuration asks for {[size, inputs]}")
        else:
            assert self._format is not None
            found = self._format.load(_ModuleTensors(self), module, size, inputs, self._scheme)
        for name in (weight, f"{module}.qweight", f"{module}.weight_packed"):
            self.skip(name)
        return found

    def _take_groups(self, outputs: Mapping[str, int], inputs: int, bias: bool) -> LinearWeight:
        """As `take_linear`, where at least one part has scales for groups."""
        fused_bias = self._take_bias(outputs) if bias else None
        found: list[Groups | torch.Tensor] = []
        for name, size in outputs.items():
            if self._in_groups(name):
                found.append(self._groups(name, size, inputs))
            else:
                found.append(self._plain(f"{name}.weight", self._take(f"{name}.weight", (size, inputs)), self.dtype))
            if not bias and self.has(f"{name}.bias"):  # AutoGPTQ writes zeros for linears without a bias
                self._skip_zeros(f"{name}.bias")
        if self.weights == "groups":
            packed = [part.pack() if isinstance(part, Groups) else None for part in found]
            known = [part for part in packed if part is not None]
            joined = join_grouped(known) if len(known) == len(packed) else None
            if joined is not None:
                return linear_from_grouped(joined, fused_bias, dtype=self.dtype, batch_invariant=self.batch_invariant)
        parts = [part.dequantise().to(self.dtype) if isinstance(part, Groups) else part for part in found]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._packed(weight, fused_bias, plain=not self._plain_modules.isdisjoint(outputs))

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None, *, plain: bool) -> LinearWeight:
        """From floats; quantised as `weights` says, unless `plain`."""
        format = "plain" if plain or self.weights in ("none", "groups") else self.weights
        return pack_linear(weight, bias, format=format, batch_invariant=self.batch_invariant)

    def _take_bias(self, outputs: Mapping[str, int]) -> torch.Tensor:
        biases = [self.take(f"{name}.bias", size) for name, size in outputs.items()]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def _skip_zeros(self, name: str) -> None:
        if not bool((self._prefetch.read(name) != 0).any()):
            self.skip(name)

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """On the device, in the dtype of the files."""
        found = self.source.shapes.get(name)
        if found is None:
            raise WeightsError(f"the weights lack {self._wanted(name)}")
        if found != shape:
            raise WeightsError(f"{name} has shape {list(found)}, the configuration asks for {list(shape)}")
        tensor = self._prefetch.read(name)
        self.skip(name)
        return tensor

    def _wanted(self, name: str) -> str:
        """`name`, or what a quantised checkpoint has in its place."""
        module, _, last = name.rpartition(".")
        if last != "weight" or self._format is None or "_proj" not in module or self._scheme.leaves_alone(module):
            return name
        return f"{self._format.main(module)} (or {name})"

    def _joined(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Weights below each other, in `dtype`; `parts` is emptied, so that no more than one is there twice."""
        if len(parts) == 1:
            name, part = parts.popitem()
            return self._plain(f"{name}.weight", part, self.dtype)
        sizes = [len(part) for part in parts.values()]
        weight = torch.empty(sum(sizes), next(iter(parts.values())).shape[1], dtype=self.dtype, device=self.device)
        for rows, name in zip(weight.split(sizes), list(parts), strict=True):
            rows.copy_(self._plain(f"{name}.weight", parts.pop(name), self.dtype))
        return weight

    def _plain(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantise_fp8(tensor, self._scale(name, tensor), dtype)
        if not tensor.is_floating_point():
            raise WeightsError(not_floats(name, str(tensor.dtype).removeprefix("torch.")))
        return tensor.to(dtype)

    def read_stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """`name` on the device, as stored; see `Tensors`."""
        found = self.source.shapes.get(name)
        if found is None:
            raise WeightsError(f"the weights lack {name}")
        if shape and found != shape:
            raise WeightsError(f"{name} has shape {list(found)}, {list(shape)} was expected")
        return self._prefetch.read(name)

    def _scale(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return find_scale(self.source, self._prefetch.upload, name, weight.shape)


class _ModuleTensors:
    """The `Tensors` of a loader."""

    def __init__(self, loader: WeightLoader) -> None:
        self.shapes = loader.source.shapes
        self._loader = loader

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        return self._loader.read_stored(name, shape)
