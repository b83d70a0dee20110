"""What KV between hosts costs: two processes, and optionally two network namespaces, one link between them.

    python -m bench.nixl_path [--transports tcp] [--prompt-mb 8 45] [--within-owner "ip netns exec a"] [--interface kv0]

Prints GB/s of the negotiation's test pattern, of pulls of that size with and without checksums, of a plain memory copy
beside it, and what an idle agent takes of a core.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common.protocol import messages
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import MemoryDescribed
from common.transfer.base import RemoteBlocks
from common.transfer.checksums import crc32
from common.transfer.nixl import NixlTransport, SharedMemory
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import Segment

BLOCK_BYTES = 368_640
"""16 tokens of SmolLM2-135M in float16: 30 layers, 3 heads of 64, keys and values."""
NUM_BLOCKS = 256
IDLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="tcp", help="UCX_TLS; empty: UCX chooses")
    parser.add_argument("--interface", default="", help="UCX_NET_DEVICES")
    parser.add_argument("--within-owner", default="", help="command that starts the owner, for example `ip netns exec a`")
    parser.add_argument("--prompt-mb", type=float, nargs="+", default=[8.0, 45.0], help="MB a pull copies")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--owner", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.owner:
        own(arguments)
    else:
        measure(arguments)


def own(arguments: argparse.Namespace) -> None:
    """The other process: holds the blocks, and says what it used of a core when asked."""
    segment = Segment.create(arguments.owner, "owner", num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, fingerprint="m")
    segment.blocks[:] = np.random.default_rng(0).integers(0, 256, segment.blocks.shape, np.uint8)
    agent = NixlAgent("owner", interface=arguments.interface, transports=arguments.transports)
    described = SharedMemory(agent, [(segment, "m")]).describe(WorkerRef("prefill", "p", 1))
    sums = [crc32(block) for block in segment.blocks]
    print(json.dumps({"described": messages.encode(described).hex(), "checksums": sums}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(cpu_s()), flush=True)


def measure(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [*shlex.split(arguments.within_owner), sys.executable, "-m", "bench.nixl_path", "--owner", folder]
        command += ["--transports", arguments.transports, "--interface", arguments.interface]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
            try:
                report(arguments, owner)
            finally:
                owner.kill()


def report(arguments: argparse.Namespace, owner: subprocess.Popen[str]) -> None:
    said = answer(owner)
    described = messages.decode(bytes.fromhex(said["described"]))
    assert isinstance(described, MemoryDescribed)
    transport = NixlTransport(
        NixlAgent("reader", interface=arguments.interface, transports=arguments.transports), timeout_s=30.0
    )
    transport.add(described)
    print(f"test pattern: {transport.measure('owner'):.3f} GB/s")
    mine = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    for size_mb in arguments.prompt_mb:
        blocks = range(max(1, min(NUM_BLOCKS, round(size_mb * 1e6 / BLOCK_BYTES))))
        for checksums in ((), said["checksums"][: len(blocks)]):
            source = RemoteBlocks("there", "owner", "m", blocks, [0] * len(blocks), checksums)
            times: list[float] = []
            for _ in range(arguments.repeats):
                began_at = time.perf_counter()
                transport.read(source, mine, blocks)
                times.append(time.perf_counter() - began_at)
            with_sums = "with checksums" if checksums else "no checksums"
            speed = len(blocks) * BLOCK_BYTES / median(times) / 1e9
            print(
                f"pull of {len(blocks) * BLOCK_BYTES / 1e6:.1f} MB, {with_sums}: {1e3 * median(times):.1f} ms, {speed:.3f} GB/s"
            )
    began_at = time.perf_counter()
    copied = mine.copy()
    print(f"memory copy beside it: {copied.nbytes / (time.perf_counter() - began_at) / 1e9:.2f} GB/s")
    assert owner.stdin is not None
    before, theirs_before = cpu_s(), asked(owner)
    time.sleep(IDLE_S)
    mine_s, theirs_s = cpu_s() - before, asked(owner) - theirs_before
    print(f"idle: reader {100 * mine_s / IDLE_S:.1f} %, owner {100 * theirs_s / IDLE_S:.1f} % of a core")


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def asked(owner: subprocess.Popen[str]) -> float:
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()
    return answer(owner)


def answer(owner: subprocess.Popen[str]) -> Any:
    assert owner.stdout is not None
    line = owner.stdout.readline()
    if not line:
        raise SystemExit("the other process has ended")
    return json.loads(line)


if __name__ == "__main__":
    assert Path("/dev/shm").is_dir()
    main()
