"""Which tensors a checkpoint must hold, and of which shapes: asked of the files' headers, before any is loaded. Torch-free.

The loader checks the same again as it reads; see `common/models/formats` for what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from common.models.formats.detect import FP8_BLOCK
from common.models.formats.scheme import FormatName, WeightScheme
from common.models.spec import ModelSpec
from common.models.weights.errors import WeightsError
from common.models.weights.expected import decoder_shapes

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_MAIN: dict[FormatName, str] = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "mxfp4": "weight_packed"}
_MAIN |= {"int8": "weight", "nf4": "weight.quant_state.bitsandbytes__nf4"}
_MXFP4_GROUP = 32


def check_shapes(found: Shapes, model: ModelSpec, *, fp8: frozenset[str] = frozenset()) -> None:
    """Check names and shapes of all tensors of `model`. found: those of the files. fp8: names of the float8 ones.

    :raises WeightsError: if one is missing or has another shape than the configuration and the format ask for.
    """
    for name, shape in decoder_shapes(model).items():
        if f"{name}_blocks" in found:
            _check_blocks(found, name, shape)
        elif len(shape) == 3 and name not in found:
            for module, size in _unrolled(name, shape, found):
                _check_linear(found, module, size, model.quantization, fp8)
        elif len(shape) == 2 and name.endswith(".weight"):
            _check_linear(found, name.removesuffix(".weight"), shape, model.quantization, fp8)
        else:
            _check(found, name, shape)


def _check_linear(found: Shapes, module: str, shape: Shape, scheme: WeightScheme, fp8: frozenset[str]) -> None:
    name, main = f"{module}.weight", _main(scheme, module, found)
    in_format = main in found and (main != name or f"{name}_scale" in found)
    if main and in_format and not scheme.leaves_alone(module):
        for tensor, allowed in _of_format(scheme, module, shape, main, found):
            _check(found, tensor, *allowed)
        return
    if name not in found and main and "_proj" in module and not scheme.leaves_alone(module):
        raise WeightsError(f"the weights lack {main} (or {name})")
    _check(found, name, shape)
    if name in fp8:
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scale = next((one for one in (f"{name}_scale_inv", f"{name}_scale") if one in found), "")
        if not scale:
            raise WeightsError(f"{name} is float8 and has no scale beside it")
        if math.prod(found[scale]) != 1:
            _check(found, scale, blocks, (shape[0],), (shape[0], 1))


def _main(scheme: WeightScheme, module: str, found: Shapes) -> str:
    """The tensor that a module has in this format alone; empty for floats."""
    if scheme.name == "nvfp4":
        return f"{module}.weight_packed" if f"{module}.weight_packed" in found else f"{module}.weight"
    return f"{module}.{_MAIN[scheme.name]}" if scheme.name in _MAIN else ""


def _of_format(
    scheme: WeightScheme, module: str, shape: Shape, main: str, found: Shapes
) -> Iterator[tuple[str, tuple[Shape, ...]]]:
    """Yield each tensor of a module with the shapes that it may have; none for any."""
    outputs, inputs = shape
    group, each = scheme.group or inputs, 32 // min(scheme.bits, 32)
    groups = -(-inputs // group)
    if scheme.name in ("awq", "gptq") and (inputs % group or outputs % each):
        raise WeightsError(
            f"{module}: {scheme.name.upper()} packs multiples of {group} inputs and {each} outputs, not {inputs} and {outputs}"
        )
    if scheme.name in ("mxfp4", "nvfp4") and inputs % group:
        raise WeightsError(f"{module}: {scheme.name.upper()} packs multiples of {group} inputs, not {inputs}")
    match scheme.name:
        case "awq":
            yield main, ((inputs, outputs // 8),)
        case "gptq":
            yield main, ((inputs // each, outputs),)
            if f"{module}.g_idx" in found:
                yield f"{module}.g_idx", ((inputs,),)
        case "packed":
            yield main, ((outputs, -(-inputs // each)),)
        case "mxfp4" | "nvfp4":
            yield main, ((outputs, inputs // 2),)
        case "int8":
            yield main, (shape,)
        case _:
            yield f"{module}.weight", ()
            yield f"{module}.weight.absmax", ()
            yield f"{module}.weight.quant_map", ((16,),)
    if scheme.name in ("awq", "gptq"):
        yield f"{module}.qzeros", ((groups, outputs // each),)
        yield f"{module}.scales", ((groups, outputs),)
    elif scheme.name == "int8":
        yield f"{module}.weight_scale", ((outputs, 1), (outputs,), (1,), ())
    elif scheme.name == "packed":
        yield f"{module}.weight_scale", ((outputs, groups), (1,), (), *(((outputs,),) if groups == 1 else ()))
    elif scheme.name in ("mxfp4", "nvfp4"):
        yield f"{module}.weight_scale", ((outputs, groups),)
    if scheme.name == "nvfp4":
        yield f"{module}.{'weight_scale_2' if main.endswith('.weight') else 'weight_global_scale'}", ((1,), ())


def _check_blocks(found: Shapes, name: str, shape: Shape) -> None:
    experts, inputs, outputs = shape
    if inputs % _MXFP4_GROUP:
        raise WeightsError(f"{name}: MXFP4 packs multiples of {_MXFP4_GROUP} inputs, not {inputs}")
    groups = inputs // _MXFP4_GROUP
    _check(found, f"{name}_blocks", (experts, outputs, groups, _MXFP4_GROUP // 2))
    _check(found, f"{name}_scales", (experts, outputs, groups))


def _unrolled(name: str, shape: Shape, found: Shapes) -> Iterator[tuple[str, Shape]]:
    """Stacked experts one by one. :raises WeightsError: if the files have neither."""
    prefix, _, last = name.rpartition(".")
    if not any(one.startswith(f"{prefix}.0.") for one in found):
        raise WeightsError(f"the weights lack {name}")
    experts, inputs, outputs = shape
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    for expert in range(experts):
        for part in parts:
            yield f"{prefix}.{expert}.{part}", (outputs // len(parts), inputs)


def _check(found: Shapes, name: str, *allowed: Shape) -> None:
    """allowed: none for any shape."""
    if name not in found:
        raise WeightsError(f"the weights lack {name}")
    is_number = math.prod(found[name]) == 1 and (1,) in allowed
    if allowed and found[name] not in allowed and not is_number:
        asked = " or ".join(str(list(one)) for one in allowed if one)
        raise WeightsError(f"{name} has shape {list(found[name])}, the configuration asks for {asked}")
