"""Kernels compiled for Hopper and Blackwell on a machine without a GPU, and what the machine code says about them.

Under pytest kernels are interpreted (TRITON_INTERPRET=1), so another process per test module, with a child for each processor,
compiles them all. A test module lists `CASES` and checks each build:

    CASES = [KernelCase("4096", "common.ops.x_triton", "_kernel", {"x": "*bf16", "rows": "i32"}, {"BLOCK": 4096, "PDL": True})]

    @pytest.fixture(scope="module")
    def builds() -> Builds:
        return compile_cases(CASES)

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
        check(case, arch, builds)

`python -m tests.ops.compiling tests.ops.test_x [DIRECTORY]` prints a table of a module's cases, and keeps PTX and cubins in
DIRECTORY: `nvdisasm` beside Triton's ptxas shows the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ARCHITECTURES = (90, 100)
SHARED_LIMIT_BYTES = 227 * 1024
_ROOT = Path(__file__).parents[2]

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "cp.async.bulk": r"\bcp\.async\.bulk\.(?!commit|wait)",
    "griddepcontrol.wait": r"\bgriddepcontrol\.wait",
    "griddepcontrol.launch_dependents": r"\bgriddepcontrol\.launch_dependents",
    # 16 bytes a thread or more
    "ld.global.v4": r"\bld\.global[\w.:]*\.(?:v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)",
    "st.global.v4": r"\bst\.global[\w.:]*\.(?:v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)",
    "ld.global": r"\bld\.global",
    "st.global": r"\bst\.global",
    "bar": r"\b(?:bar|barrier)\.",
    "atom": r"\b(?:atom|red)\.",
    # a product and a sum that are, or may be, rounded once
    "fused": r"\bfma\.rn\.(?:ftz\.)?f32|\b(?:add|sub)\.(?:ftz\.)?f32",
}
_WRITES = ("st.global", "atom", "cp.async")


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One kernel with one set of constants.

    signature: Triton's type by parameter: "*bf16", "*fp8e4nv", "i32", …; pointers are taken as multiples of 16, as torch gives
    them, unless they say "*bf16:1"; integers are not, unless they say "i32:16". "block<bf16[64, 128]>" is a tensor descriptor
    of a kernel in Gluon, in the layout that its launcher takes. constants: constexpr parameters, and those that
    are None; "tl.float32" stands for the Triton object of that name. A parameter that is in neither keeps its default.
    """

    name: str
    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, int | float | bool | str | None]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    expects: tuple[str, ...] = ()  # names in INSTRUCTIONS, on every architecture
    expects_90: tuple[str, ...] = ()
    expects_100: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    max_registers: int = 255
    stack_bytes: int = 0  # what may lie in local memory: spills do
    architectures: tuple[int, ...] = ARCHITECTURES

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"


@dataclasses.dataclass(frozen=True)
class Build:
    """instructions: how often each of INSTRUCTIONS is in the PTX. early_writes: of them, those that write global memory or copy
    to shared memory before the kernel has waited for the one before it. overwritten_operands: see the function."""

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    instructions: dict[str, int] = dataclasses.field(default_factory=dict)
    early_writes: int = 0
    overwritten_operands: int = 0
    error: str = ""


Builds = dict[tuple[str, int], Build]


def compile_cases(cases: list[KernelCase], directory: Path | None = None) -> Builds:
    """Builds by (name of the case, architecture). With `directory`, PTX and cubins are kept there.

    :raises RuntimeError: if the compiling process itself fails; a kernel that doesn't compile is a `Build` with an error.
    """
    assert len({str(case) for case in cases}) == len(cases), "names of cases are unique"
    request = {"cases": [dataclasses.asdict(case) for case in cases], "directory": str(directory) if directory else None}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "tests.ops.compiling"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.run(
            command, input=json.dumps(request), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=_ROOT
        )
        errors.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"compiling failed: {errors.read()[-4000:]}")
    answers = json.loads(process.stdout.splitlines()[-1])
    return {(name, arch): Build(**build) for name, arch, build in answers}


def disassembled(cubin: Path) -> str:
    """Return the machine code of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


def check(case: KernelCase, arch: int, builds: Builds) -> None:
    """No spills, no more shared memory than there is, and the instructions that the case names."""
    build = builds[str(case), arch]
    assert not build.error, build.error
    assert build.stack_bytes <= case.stack_bytes, f"{build.stack_bytes} bytes of local memory: spills"
    assert build.shared_bytes <= SHARED_LIMIT_BYTES, f"{build.shared_bytes} bytes of shared memory"
    assert build.registers <= case.max_registers, f"{build.registers} registers"
    assert not build.early_writes, f"{build.early_writes} writes or copies before griddepcontrol.wait"
    assert not build.overwritten_operands, f"{build.overwritten_operands} writes to registers that wgmma may still read"
    wanted = {*case.expects, *(case.expects_90 if arch == 90 else case.expects_100)}
    missing = sorted(name for name in wanted if not build.instructions[name])
    present = sorted(name for name in case.forbids if build.instructions[name])
    assert not missing, f"not in the PTX for sm_{arch}: {missing}"
    assert not present, f"in the PTX for sm_{arch}: {present}"


# ── in the compiling process ─────────────────────────────────────────────────────────────────────────────────────────


def _compile(case: dict[str, Any], arch: int, directory: Path | None) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function: Any = getattr(importlib.import_module(case["module"]), case["kernel"])
    while not isinstance(function, triton.JITFunction):
        function = function.fn  # autotuners and heuristics wrap the kernel
    constants = {name: _constant(value) for name, value in case["constants"].items()}
    given = case["signature"]
    unknown = (given.keys() | constants.keys()) - set(function.arg_names)
    if unknown:
        raise ValueError(f"{case['kernel']} has no parameters {sorted(unknown)}")
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(function.params):
        if parameter.name not in given:
            constants.setdefault(parameter.name, parameter.default)
            signature[parameter.name] = "constexpr"
            continue
        if given[parameter.name].startswith("block<"):
            signature[parameter.name] = _descriptor(given[parameter.name])
            continue
        kind, _, divisor = given[parameter.name].partition(":")
        signature[parameter.name] = kind
        if (divisor or ("16" if kind.startswith("*") else "1")) == "16":
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": case["num_warps"], "num_stages": case["num_stages"], "launch_pdl": bool(constants.get("PDL"))}
    options["enable_fp_fusion"] = case["enable_fp_fusion"]
    if case["maxnreg"] is not None:
        options["maxnreg"] = case["maxnreg"]
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        fn=function,
        signature=signature,
        constexprs={n: constants[n] for n, s in signature.items() if s == "constexpr"},
        attrs=attributes,
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    if directory is not None:
        stem = f"{case['kernel']}-{case['name']}-sm{arch}".replace(" ", "_").replace("/", "_")
        (directory / f"{stem}.ptx").write_text(ptx)
        (directory / f"{stem}.cubin").write_bytes(cubin)
    registers, stack = _resources(cubin)
    instructions = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    early = [name for name in _WRITES if waits for _ in re.finditer(INSTRUCTIONS[name], before)]
    overwritten = _overwritten_operands(cubin) if instructions["wgmma"] else 0  # to disassemble takes half a second
    return Build(registers, stack, compiled.metadata.shared, instructions, len(early), overwritten)


_NO_ANSWER = ("ST", "RED", "LDGSTS", "HGMMA", "WARP", "BAR", "BRA", "DEPBAR", "LDGDEPBAR", "UTMA", "SYNCS", "CCTL", "NOP")


def _overwritten_operands(cubin: bytes) -> int:
    """Return how many instructions of loops write a register that a wgmma of this turn or the one before may still read.

    See `linear/settled_triton.py`. Of each loop that reads operands of wgmma from registers, in two turns."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = disassembled(Path(file.name))
    lines = [re.sub(r"^\s*/\*[0-9a-f]+\*/\s*", "", line).strip() for line in shown.splitlines()]
    labels = {line.rstrip(":"): index for index, line in enumerate(lines) if re.match(r"\.L_x_\d+:", line)}
    most = 0
    for index, line in enumerate(lines):
        if (found := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) and labels.get(found[1], index) < index:
            most = max(most, _overwritten_in_turns(lines[labels[found[1]] : index]))
    return most


def _overwritten_in_turns(body: list[str]) -> int:
    groups: list[set[int]] = []
    reading: set[int] = set()
    overwritten = 0
    for line in body * 2:
        if found := re.match(r"(?:@!?U?P\d+ )?HGMMA\S* R\d+, (?:R(\d+), )?", line):
            if found[1]:  # 16 columns of 16 bits: four registers
                reading |= set(range(int(found[1]), int(found[1]) + 4))
            if "gsb0" in line:
                groups.append(reading)
                reading = set()
        elif found := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", line):
            del groups[: max(0, len(groups) - int(found[1], 16))]
        elif any(_written(line) & group for group in (*groups, reading)):
            overwritten += 1
    return overwritten


def _written(line: str) -> set[int]:
    """Registers that an instruction writes."""
    found = re.match(r"(?:@!?U?P\d+ )?(\S+) +(?:!?U?P\w+, +)*R(\d+)", line)
    if found is None or found[1].startswith(_NO_ANSWER):
        return set()
    count = 4 if ".128" in found[1] or "LDSM" in found[1] else 2 if ".64" in found[1] or ".WIDE" in found[1] else 1
    return set(range(int(found[2]), int(found[2]) + count))


def _descriptor(given: str) -> str:
    """Triton's type of a tensor descriptor."""
    from triton.experimental.gluon import language as gl

    block = given.removeprefix("block<").removesuffix(">")
    rows, columns = (int(size) for size in re.findall(r"\d+", block.partition("[")[2]))
    return f"tensordesc<{block},{gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)!r}>"


def _constant(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value[3:])
    return value


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _answer(directory: Path | None, case: dict[str, Any], arch: int) -> tuple[str, int, dict[str, Any]]:
    try:
        build = _compile(case, arch, directory)
    except Exception as error:
        build = Build(error=f"{type(error).__name__}: {error}"[-4000:])
    return f"{case['kernel']}-{case['name']}", arch, dataclasses.asdict(build)


def _serve() -> None:
    """Compiles what stdin asks for, and answers with one line of JSON."""
    request = json.loads(sys.stdin.read())
    directory = Path(request["directory"]) if request["directory"] else None
    asked = [(case, arch) for case in request["cases"] for arch in case["architectures"]]
    for module in dict.fromkeys(case["module"] for case in request["cases"]):
        with contextlib.suppress(Exception):  # that of each of its kernels, then
            importlib.import_module(module)  # once, and not in each child
    # raises if a child crashes
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as children:
        answers = list(children.map(functools.partial(_answer, directory), *zip(*asked, strict=True)))
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


def _show(module: str, directory: Path | None) -> None:
    """The table of a test module's cases."""
    cases: list[KernelCase] = importlib.import_module(module).CASES
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    for (name, arch), build in compile_cases(cases, directory).items():
        counts = " ".join(f"{key}={count}" for key, count in build.instructions.items() if count)
        facts = build.error or f"{build.registers} registers, {build.stack_bytes} stack, {build.shared_bytes} shared; {counts}"
        sys.stdout.write(f"{name} sm_{arch}: {facts}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _show(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        _serve()
