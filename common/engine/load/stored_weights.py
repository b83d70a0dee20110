"""What each linear and each stack of experts of a model takes in a device's memory. Torch-free.

As the loader packs them (`weights/base.py`, `weights/experts.py`), by the rules of `formats/stored.py`. How the files hold a
module is told by the configuration, of GGUF by its tensors' types. Modules that FP8 at load would leave alone are known only
after it was measured (`fp8_choice`): they are taken to be FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.engine.load.precision import Precision
from common.models.formats.stored import (
    BLOCK_FORMS,
    Fp8Form,
    GroupsForm,
    StoredForm,
    can_join_fp8,
    can_join_groups,
    experts_format,
    form_of,
)
from common.models.spec import EACH_EXPERT, ExpertsSpec, ModelSpec
from common.ops.moe.packed_layout import fp8_bytes, int4_bytes, mxfp4_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCALE_BYTES = 4


class StoredWeights:
    """Counts the bytes of `model`'s modules in `precision`.

    block_types: of a GGUF file, the type of each tensor by the tensor's name.
    """

    def __init__(self, model: ModelSpec, precision: Precision, block_types: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._weights = precision.weights
        self._block_types = block_types
        self._scheme = model.quantization
        self._item_bytes = ITEM_BYTES[precision.compute]
        self._is_gguf = block_types is not None or self._scheme.name == "gguf"
        self._holds_fp8 = self._scheme.name in ("fp8", "fp8_blocks", "nvfp4")  # NVFP4's scales are E4M3
        stacked = any(isinstance(layer.mlp, ExpertsSpec) for layer in model.layers) and not model.names.layer.each_expert
        self._experts_alone = self._scheme.name == "mxfp4" and stacked  # gpt-oss' own files, whatever they say of the rest

    def floats(self, numbers: int) -> int:
        """Return the bytes of numbers that are never quantised."""
        return numbers * self._item_bytes

    def head(self) -> int:
        """Return the bytes of the output head."""
        size, inputs = self._model.head_size, self._model.hidden_size
        return size * (inputs + _SCALE_BYTES) if self._weights == "int8" else self.floats(size * inputs)

    def linear(self, prefix: str, names: Sequence[str], outputs: Sequence[int], inputs: int) -> int:
        """Return the bytes of a linear of the parts `names`, below each other. One name is the whole, fused in the files."""
        sizes = [sum(outputs)] if len(names) == 1 else list(outputs)
        forms = [None if self._experts_alone else self._form(f"{prefix}.{name}", inputs) for name in names]
        groups = [form for form in forms if isinstance(form, GroupsForm)]
        fp8 = [form for form in forms if isinstance(form, Fp8Form)]
        numbers = sum(sizes) * inputs
        per_output = numbers + _SCALE_BYTES * sum(sizes)
        if self._weights == "int8":
            return per_output
        if self._weights == "groups" and len(groups) == len(forms) and can_join_groups(groups, inputs):
            has_offsets = any(form.offsets != "none" for form in groups)
            return groups[0].layout(inputs).nbytes(sum(sizes), offsets=has_offsets)
        if self._weights == "fp8":
            if len(fp8) == len(forms) and can_join_fp8([form.in_blocks for form in fp8], sizes):
                return fp8_bytes(sum(sizes), inputs, in_blocks=fp8[0].in_blocks)
            if groups or not self._holds_fp8:  # quantised at load
                return per_output
        return self.floats(numbers)

    def experts(self, prefix: str, spec: ExpertsSpec) -> int:
        """Return the bytes of a layer's experts. prefix: of the layer."""
        count, hidden, middle = spec.router.num_experts, self._model.hidden_size, spec.intermediate_size
        names = self._model.names.layer
        gate, up, down = names.each_expert or EACH_EXPERT
        prefix = f"{prefix}.{names.experts}"
        return self._stack(prefix, count, (gate, up), middle, hidden) + self._stack(prefix, count, (down,), hidden, middle)

    def _stack(self, prefix: str, count: int, names: Sequence[str], outputs: int, inputs: int) -> int:
        """Return the bytes of one linear of all experts, of parts [outputs, inputs] each: quantised if all of them are."""
        n = len(names) * outputs
        if self._weights not in ("groups", "fp8"):
            return self.floats(count * n * inputs)
        # patterns tell layers apart and not experts; to ask of each expert takes seconds where there are many of both
        asked = range(count) if self._is_gguf else (0, count - 1)
        forms = {self._form(f"{prefix}.{expert}.{name}", inputs) for expert in asked for name in names}
        form = forms.pop() if len(forms) == 1 else None
        format = experts_format(form, outputs, inputs)
        if isinstance(form, Fp8Form) and format == "fp8":
            return count * fp8_bytes(n, inputs, in_blocks=form.in_blocks)
        if isinstance(form, GroupsForm) and format == "int4":
            return count * int4_bytes(n, inputs, form.group, offsets=form.offsets != "none")
        return count * mxfp4_bytes(n, inputs) if format == "mxfp4" else self.floats(count * n * inputs)

    def _form(self, module: str, inputs: int) -> StoredForm:
        """Return how the files hold `module`, as far as the loader keeps it so."""
        if self._is_gguf and self._weights != "groups":
            return None
        if self._block_types is not None:
            return BLOCK_FORMS.get(self._block_types.get(f"{module}.weight", ""))
        return None if self._scheme.leaves_alone(module) else form_of(self._scheme, inputs)
