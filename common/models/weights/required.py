"""Which tensors a checkpoint must hold, of which shapes and types, and which it may: asked of the files' headers, before any is
loaded. Torch-free.

The loader checks the same again as it reads; see `common/models/formats` for what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from common.models.formats.companions import is_companion
from common.models.formats.detect import FP8_BLOCK
from common.models.formats.scheme import FormatName
from common.models.spec import ModelSpec
from common.models.weights.errors import WeightsError
from common.models.weights.expected import ROPE_FACTORS, TARGET_OFFSETS, decoder_shapes

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
FP8 = "F8_E4M3"
_WORDS, _BYTES = frozenset({"I32"}), frozenset({"U8"})
_INDICES = frozenset({"I32", "I64"})
_ZERO_POINTS = frozenset({"I8", "I32"})
_FP8_SCALES = FLOATS | {FP8}
_ABSMAX = FLOATS | _BYTES

_MAIN: dict[FormatName, str] = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "mxfp4": "weight_packed"}
_MAIN |= {"int8": "weight", "nf4": "weight.quant_state.bitsandbytes__nf4"}
_MXFP4_GROUP = 32


class Content(NamedTuple):
    """What a tensor must hold: "shape": the two numbers of a module's shape; "state": bitsandbytes' description of a weight of
    that shape; "zeros"."""

    kind: Literal["shape", "state", "zeros"]
    shape: Shape = ()


class _Asked(NamedTuple):
    """A tensor of a quantised module. shapes: that it may have; none for any. types: of safetensors."""

    name: str
    shapes: tuple[Shape, ...]
    types: frozenset[str]


def check_tensors(found: Shapes, model: ModelSpec, types: Mapping[str, str]) -> dict[str, Content]:
    """Check names, shapes and types of all tensors of `model`. found: those of the files. types: theirs, as safetensors call
    them; empty where the files' reader knows them (GGUF). Return what some of them must hold.

    :raises WeightsError: if one is missing, or has another shape or type than the configuration and the format ask for, or if
        one is left that the model does not have.
    """
    check = _Check(found, model, types)
    for name, shape in decoder_shapes(model).items():
        check.tensor(name, shape)
    check.end()
    return check.contents


def not_floats(name: str, kind: str) -> str:
    """Return what an error says of a tensor of integers in place of floats."""
    reason = ": its scale is missing, or quantization_config leaves it as it was" if name.endswith(".weight") else ""
    return f"{name} is {kind}, and floats are expected{reason}"


def refuse_others(names: Iterable[str]) -> None:
    """:raises WeightsError: if there are tensors that nobody asked for: this is another model than its configuration says."""
    left = sorted(names)
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise WeightsError(f"the weights hold tensors that this model does not have: {', '.join(left[:3])}{more}")


class _Check:
    """Asks `found` for one tensor after the other, and at the end for what nobody asked for: see `check_tensors`."""

    def __init__(self, found: Shapes, model: ModelSpec, types: Mapping[str, str]) -> None:
        self.contents: dict[str, Content] = {}
        self._found, self._model, self._types, self._scheme = found, model, types, model.quantization
        self._used = set[str]()
        self._is_in_format = self._scheme.name in ("plain", "gguf") or self._scheme.kind != "groups"

    def tensor(self, name: str, shape: Shape) -> None:
        if f"{name}_blocks" in self._found:
            self._blocks(name, shape)
        elif len(shape) == 3 and name not in self._found:
            for module, size in self._unrolled(name, shape):
                self._linear(module, size)
        elif len(shape) == 2 and name.endswith(".weight"):
            self._linear(name.removesuffix(".weight"), shape)
        else:
            self._one(name, (shape,), frozenset({"I64"}) if name == TARGET_OFFSETS else FLOATS)

    def end(self) -> None:
        """:raises WeightsError: if the format is nowhere, or a tensor is left over."""
        names = self._model.names
        is_fp8 = self._scheme.name in ("fp8", "fp8_blocks")
        if self._types and not (FP8 in self._types.values() if is_fp8 else self._is_in_format):
            raise WeightsError(f"quantization_config says {self._scheme.name}, and no weight is in that format")
        if ROPE_FACTORS in self._found:
            self._one(ROPE_FACTORS, ((self._model.head_dim // 2,),), FLOATS)
        optional = {f"{names.head}.weight"}  # some files hold the tied copy too, some what is computed here
        optional |= {f"{names.layers}.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(self._model.num_layers)}
        refuse_others(name for name in self._found.keys() - self._used - optional if not is_companion(name))

    def _linear(self, module: str, shape: Shape) -> None:
        name, main = f"{module}.weight", self._main(module)
        if main and not self._scheme.leaves_alone(module):
            if main in self._found and (main != name or f"{name}_scale" in self._found):
                self._in_format(module, shape, main)
                return
            if name not in self._found and "_proj" in module:
                raise WeightsError(f"the weights lack {main} (or {name})")
        self._one(name, (shape,), FLOATS | {FP8})
        if self._types.get(name) == FP8:
            self._fp8_scale(name, shape)

    def _in_format(self, module: str, shape: Shape, main: str) -> None:
        self._is_in_format = True
        for asked in self._of_format(module, shape, main):
            self._one(*asked)
        bias = f"{module}.bias"
        if bias in self._found and bias not in self._used:  # AutoGPTQ writes zeros for linears without a bias
            self._used.add(bias)
            self.contents.setdefault(bias, Content("zeros"))

    def _fp8_scale(self, name: str, shape: Shape) -> None:
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scale = next((one for one in (f"{name}_scale_inv", f"{name}_scale") if one in self._found), "")
        if not scale:
            raise WeightsError(f"{name} is float8 and has no scale beside it")
        if math.prod(self._found[scale]) != 1:
            self._one(scale, (blocks, (shape[0],), (shape[0], 1)), FLOATS)

    def _main(self, module: str) -> str:
        """The tensor that a module has in this format alone; empty for floats."""
        if self._scheme.name == "nvfp4":
            return f"{module}.weight_packed" if f"{module}.weight_packed" in self._found else f"{module}.weight"
        return f"{module}.{_MAIN[self._scheme.name]}" if self._scheme.name in _MAIN else ""

    def _of_format(self, module: str, shape: Shape, main: str) -> Iterator[_Asked]:
        """Yield each tensor of a module."""
        scheme, (outputs, inputs) = self._scheme, shape
        group, each = scheme.group or inputs, 32 // min(scheme.bits, 32)
        groups = -(-inputs // group)
        if scheme.name in ("awq", "gptq") and (inputs % group or outputs % each):
            packs = f"packs multiples of {group} inputs and {each} outputs"
            raise WeightsError(f"{module}: {scheme.name.upper()} {packs}, not {inputs} and {outputs}")
        if scheme.name in ("mxfp4", "nvfp4") and inputs % group:
            raise WeightsError(f"{module}: {scheme.name.upper()} packs multiples of {group} inputs, not {inputs}")
        match scheme.name:
            case "awq" | "gptq":
                yield _Asked(main, ((inputs, outputs // 8) if scheme.name == "awq" else (inputs // each, outputs),), _WORDS)
                if f"{module}.g_idx" in self._found:
                    yield _Asked(f"{module}.g_idx", ((inputs,),), _INDICES)
                yield _Asked(f"{module}.qzeros", ((groups, outputs // each),), _WORDS)
                yield _Asked(f"{module}.scales", ((groups, outputs),), FLOATS)
            case "packed":
                yield _Asked(main, ((outputs, -(-inputs // each)),), _WORDS)
                whole = (((outputs,),) if groups == 1 else ()) + ((1,), ())
                yield _Asked(f"{module}.weight_scale", ((outputs, groups), *whole), FLOATS)
                if f"{module}.weight_zero_point" in self._found:
                    packed = (-(-outputs // each), groups)
                    yield _Asked(f"{module}.weight_zero_point", ((outputs, groups), packed), _ZERO_POINTS)
                if f"{module}.weight_shape" in self._found:
                    yield _Asked(f"{module}.weight_shape", ((2,),), _INDICES)
                    self.contents[f"{module}.weight_shape"] = Content("shape", shape)
            case "int8":
                yield _Asked(main, (shape,), frozenset({"I8"}))
                yield _Asked(f"{module}.weight_scale", ((outputs, 1), (outputs,), (1,), ()), FLOATS)
                if f"{module}.weight_zero_point" in self._found:
                    self.contents[f"{module}.weight_zero_point"] = Content("zeros")
            case "mxfp4":
                yield _Asked(main, ((outputs, inputs // 2),), _BYTES)
                yield _Asked(f"{module}.weight_scale", ((outputs, groups),), _BYTES)
            case "nvfp4":
                yield _Asked(main, ((outputs, inputs // 2),), _BYTES)
                yield _Asked(f"{module}.weight_scale", ((outputs, groups),), _FP8_SCALES)
                last = "weight_scale_2" if main.endswith(".weight") else "weight_global_scale"
                yield _Asked(f"{module}.{last}", ((1,), ()), FLOATS)
            case _:
                weight = f"{module}.weight"
                yield _Asked(weight, (), _BYTES)
                yield _Asked(f"{weight}.absmax", (), _ABSMAX)
                yield _Asked(f"{weight}.quant_map", ((16,),), FLOATS)
                if self._types.get(f"{weight}.absmax") == "U8":
                    yield _Asked(f"{weight}.nested_absmax", (), FLOATS)
                    yield _Asked(f"{weight}.nested_quant_map", ((256,),), FLOATS)
                yield _Asked(main, (), _BYTES)
                self.contents[main] = Content("state", shape)

    def _blocks(self, name: str, shape: Shape) -> None:
        experts, inputs, outputs = shape
        if inputs % _MXFP4_GROUP:
            raise WeightsError(f"{name}: MXFP4 packs multiples of {_MXFP4_GROUP} inputs, not {inputs}")
        self._is_in_format = True
        groups = inputs // _MXFP4_GROUP
        self._one(f"{name}_blocks", ((experts, outputs, groups, _MXFP4_GROUP // 2),), _BYTES)
        self._one(f"{name}_scales", ((experts, outputs, groups),), _BYTES)

    def _unrolled(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """Stacked experts one by one. :raises WeightsError: if the files have neither."""
        prefix, _, last = name.rpartition(".")
        if not any(one.startswith(f"{prefix}.0.") for one in self._found):
            raise WeightsError(f"the weights lack {name}")
        experts, inputs, outputs = shape
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert in range(experts):
            for part in parts:
                yield f"{prefix}.{expert}.{part}", (outputs // len(parts), inputs)

    def _one(self, name: str, allowed: tuple[Shape, ...], types: frozenset[str]) -> None:
        """allowed: none for any shape."""
        if name not in self._found:
            raise WeightsError(f"the weights lack {name}")
        self._used.add(name)
        self.contents.pop(name, None)  # zeros, of a bias that the model has
        is_number = math.prod(self._found[name]) == 1 and (1,) in allowed
        if allowed and self._found[name] not in allowed and not is_number:
            asked = " or ".join(str(list(one)) for one in allowed if one)
            raise WeightsError(f"{name} has shape {list(self._found[name])}, the configuration asks for {asked}")
        kind = self._types.get(name)
        if kind is not None and kind not in types:
            if types >= FLOATS:
                raise WeightsError(not_floats(name, kind))
            raise WeightsError(f"{name} is {kind}, and the format has {' or '.join(sorted(types))}")
