"""What a kernel's main loop costs, read from machine code, on a machine without a GPU.

    python -m bench.engine.sass tests.ops.test_attention_compiles decode-128     cases of a test module, by part of their name
    python -m bench.engine.sass tests.ops.test_linear_compiles split --arch 100

For each case: registers, local memory (spills), programs that a multiprocessor holds (it has 227 KB of shared memory, which is
also what can be in flight there), and of the longest loop that copies to shared memory its instructions by unit, what a turn
copies, and how many bytes a cycle it could copy if nothing ever waited: by issue (four schedulers, an instruction a cycle each)
and by the integer unit (an instruction takes two cycles). An H200 reads 4.2 TB/s: 16 to 19 bytes a cycle and multiprocessor.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.ops.compiling import Build, KernelCase

_ARCHITECTURES = (90, 100)
_INTEGER = "integer"
_UNITS = (
    ("copy", r"LDGSTS|UTMALDG|UBLKCP"),
    ("load", r"LDG|LDL"),
    ("store", r"STG|STL|ATOM|RED"),
    ("shared", r"LDS|LDSM|STS|STSM"),
    ("tensor", r"HMMA|QMMA|IMMA|HGMMA|QGMMA|UTC\w*MMA"),
    ("convert", r"F2FP|F2F|I2F|F2I"),
    (_INTEGER, r"PRMT|LOP3|SHF|IADD3|VIADD|VIADDMNMX|ISETP|SEL|LEA|VIMNMX|FSETP|FSEL|FMNMX|PLOP3|SGXT|MOV"),
    ("special", r"MUFU"),
    ("shuffle", r"SHFL|VOTE|REDUX"),
    ("barrier", r"BAR|DEPBAR|LDGDEPBAR|SYNCS|WARPSYNC|WARPGROUP"),
)

Instruction = tuple[int, str, str]
"""Address, name with its modifiers, all of it."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="a test module with CASES")
    parser.add_argument("name", nargs="?", default="", help="part of the names of the cases")
    parser.add_argument("--arch", type=int, choices=_ARCHITECTURES, default=90)
    options = parser.parse_args(arguments)
    from tests.ops.compiling import compile_cases  # needs Triton, which --help does not

    cases: list[KernelCase] = [case for case in importlib.import_module(options.module).CASES if options.name in str(case)]
    with tempfile.TemporaryDirectory() as directory:
        builds = compile_cases(cases, Path(directory))
        for case in cases:
            build = builds[str(case), options.arch]
            sys.stdout.write(f"{case}\n  {build.error or resources(case, build)}\n")
            if not build.error:
                stem = f"{case}-sm{options.arch}".replace(" ", "_").replace("/", "_")
                sys.stdout.write(f"  {loop_report(disassemble(Path(directory) / f'{stem}.cubin'), case.num_warps)}\n")


def resources(case: KernelCase, build: Build) -> str:
    by_registers = 65536 // (-(-build.registers // 8) * 8 * 32 * case.num_warps)
    programs = min(by_registers, 64 // case.num_warps, 32, 227 * 1024 // (build.shared_bytes + 1024))
    facts = f"{build.registers} registers, {build.stack_bytes} local, {build.shared_bytes} shared"
    return (
        f"{facts}, {programs} programs of {case.num_warps} warps, {programs * build.shared_bytes // 1024} KB of shared memory"
    )


def disassemble(cubin: Path) -> list[Instruction]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+((?:@!?U?P\w+\s+)?(\S+)[^;]*);", text)
    return [(int(address, 16), name, whole) for address, whole, name in found]


def loop_report(code: list[Instruction], warps: int) -> str:
    loop = main_loop(code)
    if not loop:
        counts = Counter(unit_of(name) for _, name, _ in code)
        return f"no loop that copies; all {len(code)} instructions: {_listed(counts)}"
    counts = Counter(unit_of(name) for _, name, _ in loop)
    report = f"loop of {len(loop)}: {_listed(counts)}"
    copied = sum(warps * 32 * 16 for _, name, _ in loop if name.startswith("LDGSTS") and name.endswith(".128"))
    if copied:
        by_issue, by_integer = (copied * 4 / warps / cycles for cycles in (len(loop), max(1, 2 * counts[_INTEGER])))
        report += f"; copies {copied} bytes, up to {by_issue:.0f} a cycle by issue, {by_integer:.0f} by the integer unit"
    return report


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The longest run of instructions that ends with a branch back to its start, copies, and holds no such run."""
    index = {address: place for place, (address, _, _) in enumerate(code)}
    loops: list[tuple[int, int]] = []
    for place, (address, name, whole) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)$", whole.strip())
        if name.startswith("BRA") and target and int(target[1], 16) < address:
            run = (index.get(int(target[1], 16), place), place)
            if any(unit_of(each) == "copy" for _, each, _ in code[run[0] : run[1]]):
                loops.append(run)
    inner = [run for run in loops if not any(run != other and run[0] <= other[0] and other[1] <= run[1] for other in loops)]
    start, end = max(inner, key=lambda run: run[1] - run[0], default=(0, -1))
    return code[start : end + 1]


def unit_of(name: str) -> str:
    base = name.partition(".")[0]
    return next((unit for unit, pattern in _UNITS if re.fullmatch(pattern, base)), "other")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {unit}" for unit, count in counts.most_common())


if __name__ == "__main__":
    main(sys.argv[1:])
