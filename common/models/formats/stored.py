"""What a GPU keeps of a quantised weight: the rules of the loader, which has the tensors, and of estimates, which have only the
configuration. Torch-free.

A linear of several parts stays quantised where all of them do, and alike. Experts stay quantised where the grouped kernels read
the format:

kept       FP8 with a scale for each output or block of 128 × 128, MXFP4, and INT4 in groups of a multiple of 32 with whole zero
           points
not kept   FP8 whose parts are no whole number of blocks, INT8, NF4, NVFP4, INT4 in groups of 16 or sorted (act-order), and
           minima that are no zero points
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from common.models.formats.detect import FP8_BLOCK
from common.models.formats.scheme import WeightScheme
from common.ops.moe.packed_layout import GroupedFormat
from common.ops.quant.group_layout import Code, GroupLayout, can_pack

Offsets = Literal["none", "zeros", "minima"]
"""What is added to scaled codes: nothing, whole zero points times the scale, or any number."""

_MIN_EXPERT_GROUP = 32


class Fp8Form(NamedTuple):
    """FP8 with a scale for each block of 128 × 128, or for each output."""

    in_blocks: bool


class GroupsForm(NamedTuple):
    """Codes with a scale for each `group` inputs.

    ordered: whether the inputs are sorted by group. channel: whether outputs have another factor.
    """

    code: Code
    group: int
    offsets: Offsets = "none"
    ordered: bool = False
    channel: bool = False

    def layout(self, inputs: int) -> GroupLayout:
        return GroupLayout.of(self.code, self.group, inputs, ordered=self.ordered)


StoredForm = Fp8Form | GroupsForm | None
"""How the files hold a weight; None: as floats."""

BLOCK_FORMS: dict[str, GroupsForm] = {
    "Q4_0": GroupsForm("int4", 32),
    "Q4_1": GroupsForm("int4", 32, "minima"),
    "Q4_K": GroupsForm("int4", 32, "minima"),
    "Q8_0": GroupsForm("int8", 32),
    "Q6_K": GroupsForm("int8", 16),
    "MXFP4": GroupsForm("fp4", 32),
}
"""GGUF's block types that stay as they are on a GPU, by name; the others are dequantised."""


def form_of(scheme: WeightScheme, inputs: int) -> StoredForm:
    """Return how a checkpoint's files hold a weight that the scheme does not leave alone.

    Whether GPTQ and pack-quantized files have zero points other than the middle is not in the scheme: they are taken to have
    none. Of GGUF, whose tensors have types of their own (`BLOCK_FORMS`), a scheme names the most common width only.
    """
    code: Code = "int8" if scheme.bits == 8 else "int4"
    group = scheme.group or inputs
    match scheme.name:
        case "plain":
            return None
        case "fp8" | "fp8_blocks":
            return Fp8Form(scheme.name == "fp8_blocks")
        case "awq":
            return GroupsForm(code, group, "zeros")
        case "gptq" | "packed":
            return GroupsForm(code, group, ordered=scheme.act_order and group < inputs)
        case "nf4":
            return GroupsForm("nf4", group)
        case "mxfp4":
            return GroupsForm("fp4", group)
        case "nvfp4":
            return GroupsForm("fp4", group, channel=True)
        case "int8" | "gguf":
            return GroupsForm(code, group)


def can_join_fp8(in_blocks: Sequence[bool], outputs: Sequence[int]) -> bool:
    """Whether FP8 weights of so many outputs, below each other, are one: no two kinds of scales, and no block across a seam."""
    return len(set(in_blocks)) == 1 and not (in_blocks[0] and any(size % FP8_BLOCK for size in outputs[:-1]))


def can_join_groups(forms: Sequence[GroupsForm], inputs: int) -> bool:
    """Whether weights in groups, below each other, can be packed as one."""
    packs = all(can_pack(form.group, inputs, offsets=form.offsets != "none") for form in forms)
    return packs and len({form.layout(inputs) for form in forms}) == 1


def experts_format(form: StoredForm, outputs: int, inputs: int) -> GroupedFormat:
    """Return how the kernels get a part [outputs, inputs] of each expert's linear; "plain": dequantised."""
    if form is None:
        return "plain"
    if isinstance(form, Fp8Form):
        return "plain" if form.in_blocks and outputs % FP8_BLOCK else "fp8"
    if form.ordered or form.channel or form.group % _MIN_EXPERT_GROUP or inputs % form.group:
        return "plain"
    if form.code == "fp4":
        return "mxfp4" if form.group == _MIN_EXPERT_GROUP and form.offsets == "none" else "plain"
    return "int4" if form.code == "int4" and form.offsets != "minima" else "plain"
