"""KV over NIXL: right bytes or none, whatever the other side does; no buffer is lost, and none is written by a late read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.cache.pool import BlockPool
from common.protocol import messages
from common.protocol.errors import ConfigError, StaleHandle, TransportUnavailable
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import MemoryDescribed
from common.transfer import nixl as nixl_transport
from common.transfer.base import RemoteBlocks
from common.transfer.nixl import NixlTransport, SharedMemory
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import Segment

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")

BLOCK_BYTES = 1000
OWNER = """
import sys, time
from common.protocol import messages
from common.protocol.handles import WorkerRef
from common.transfer.nixl import SharedMemory
from common.transfer.nixl_agent import NixlAgent
from common.transfer.segment import Segment
folder, name, num_blocks, block_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
segment = Segment.create(folder, name, num_blocks=num_blocks, block_bytes=block_bytes, fingerprint="m")
for block in range(num_blocks):
    segment.blocks[block] = block + 1
segment.generations[:] = 7
memory = SharedMemory(NixlAgent(name, transports="tcp"), [(segment, "m")])
print(messages.encode(memory.describe(WorkerRef("prefill", "p", 1))).hex(), flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Owner:
    """A worker's memory in a process of its own."""

    def __init__(self, folder: Path, name: str = "owner", *, num_blocks: int = 8, block_bytes: int = BLOCK_BYTES) -> None:
        command = [sys.executable, "-c", OWNER, str(folder), name, str(num_blocks), str(block_bytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        described = messages.decode(bytes.fromhex(self.process.stdout.readline()))
        assert isinstance(described, MemoryDescribed)
        self.described = described

    def do(self, statement: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def stop(self) -> None:
        """Returns once all its threads have stopped: until then one of them may still answer."""
        self.process.send_signal(signal.SIGSTOP)
        tasks, ends_at = Path(f"/proc/{self.process.pid}/task"), time.monotonic() + 10
        while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.glob("*/stat")):
            assert time.monotonic() < ends_at
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class FaultyAgent(NixlAgent):
    """Every nth read of its own fails once it is done."""

    fail_every = 0
    reads = 0

    def begin_read(self, peer: str, local: np.ndarray, remote: np.ndarray) -> int:
        self.reads += 1
        return super().begin_read(peer, local, remote)

    def is_done(self, operation: int) -> bool:
        done = super().is_done(operation)
        if done and self.fail_every and self.reads % self.fail_every == 0:
            raise TransportUnavailable("injected: the link broke")
        return done


@pytest.fixture(scope="module")
def agent() -> FaultyAgent:
    return FaultyAgent(f"reader-{os.getpid()}", transports="tcp")


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Read by all tests that leave it as it was."""
    made = Owner(tmp_path_factory.mktemp("owner"))
    yield made
    made.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Owner]:
    """An owner of a test's own."""
    made = Owner(tmp_path, f"mortal-{time.monotonic_ns()}")
    yield made
    if made.process.returncode is None:
        made.go_on()
        made.kill()


def reader(agent: NixlAgent, owner: Owner | None = None, **settings: float) -> NixlTransport:
    transport = NixlTransport(agent, timeout_s=settings.get("timeout_s", 5.0), buffer_bytes=8 << 20, num_buffers=4)
    if owner is not None:
        transport.add(owner.described)
    return transport


def read(transport: NixlTransport, owner: Owner, blocks: list[int], generation: int = 7, fingerprint: str = "m") -> np.ndarray:
    into = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
    segment = owner.described.regions[0].segment
    source = RemoteBlocks("there", segment, fingerprint, blocks, [generation] * len(blocks))
    assert transport.read(source, into, range(len(blocks))) == into.nbytes
    return into


def refused(transport: NixlTransport, owner: Owner, error: type[Exception], **settings: object) -> None:
    """The read fails, nothing of it reaches the reader's blocks, and no buffer is lost."""
    into = np.zeros((2, BLOCK_BYTES), np.uint8)
    segment = owner.described.regions[0].segment
    source = RemoteBlocks("there", segment, "m", [1, 2], [7, 7])._replace(**settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises(error):
        transport.read(source, into, range(2))
    assert not into.any()
    assert transport.num_free_buffers == 4


def test_a_reader_gets_what_the_owner_wrote(agent: FaultyAgent, owner: Owner):
    transport = reader(agent, owner)
    got = read(transport, owner, [5, 6, 7, 1, 0, 3])
    assert got[:, 0].tolist() == got[:, -1].tolist() == [6, 7, 8, 2, 1, 4]
    assert transport.measure(owner.described.agent) > 0.001
    assert transport.num_free_buffers == 4


def test_a_block_that_was_reused_is_stale(agent: FaultyAgent, owner: Owner):
    transport = reader(agent, owner)
    read(transport, owner, [1, 2])
    owner.do("segment.generations[2] = 8")
    refused(transport, owner, StaleHandle)
    owner.do("segment.generations[2] = 7")
    assert read(transport, owner, [1, 3])[:, 0].tolist() == [2, 4]


def test_a_block_that_was_damaged_on_its_way_is_not_taken(agent: FaultyAgent, owner: Owner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_transport, "RETRY_FIRST_S", 0.0)
    transport = reader(agent, owner)
    right = [zlib.crc32(bytes([block + 1]) * BLOCK_BYTES) for block in (1, 2)]
    refused(transport, owner, StaleHandle, checksums=right[:1])
    refused(transport, owner, TransportUnavailable, checksums=[right[0], right[1] ^ 1])
    transport._peers[owner.described.agent].retry_at = 0
    into = np.zeros((2, BLOCK_BYTES), np.uint8)
    segment = owner.described.regions[0].segment
    transport.read(RemoteBlocks("there", segment, "m", [1, 2], [7, 7], right), into, range(2))
    assert into[:, 0].tolist() == [2, 3]


def test_what_does_not_fit_the_handle_is_refused(agent: FaultyAgent, owner: Owner):
    transport = reader(agent, owner)
    refused(transport, owner, StaleHandle, fingerprint="another model")
    refused(transport, owner, StaleHandle, blocks=[1, 8])
    refused(transport, owner, StaleHandle, generations=[7])
    refused(transport, owner, TransportUnavailable, segment="nobody's")
    with pytest.raises(StaleHandle, match="bytes"):
        segment = owner.described.regions[0].segment
        transport.read(RemoteBlocks("there", segment, "m", [1], [7]), np.zeros((1, 999), np.uint8), [0])


def test_a_stopped_owner_costs_a_timeout_once_and_writes_nothing_afterwards(agent: FaultyAgent, mortal: Owner):
    transport = reader(agent, mortal, timeout_s=1.0)
    read(transport, mortal, [1])
    mortal.stop()
    into = np.zeros((1, BLOCK_BYTES), np.uint8)
    source = RemoteBlocks("there", mortal.described.regions[0].segment, "m", [1], [7])
    for at_most_s in (5.0, 0.9, 0.9):  # only the first one waits
        began_at = time.monotonic()
        with pytest.raises(TransportUnavailable):
            transport.read(source, into, [0])
        assert time.monotonic() - began_at < at_most_s
    assert transport.num_free_buffers == 3, "the buffer of the read that may still end is not used for another"
    mortal.go_on()
    ends_at = time.monotonic() + 10
    while transport.num_free_buffers < 4 and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert transport.num_free_buffers == 4
    assert not into.any(), "a late answer never reaches the reader's blocks"
    assert read(transport, mortal, [1])[0, 0] == 2


def test_an_owner_that_is_given_up_while_it_is_stopped_writes_nothing_afterwards(agent: FaultyAgent, mortal: Owner):
    transport = reader(agent, mortal, timeout_s=0.3)
    read(transport, mortal, [1])
    mortal.stop()
    into = np.zeros((1, BLOCK_BYTES), np.uint8)
    source = RemoteBlocks("there", mortal.described.regions[0].segment, "m", [1], [7])
    with pytest.raises(TransportUnavailable):
        transport.read(source, into, [0])
    transport.forget(mortal.described.agent)
    free = transport.num_free_buffers
    for buffer in transport._free:
        buffer[:] = 0
    mortal.go_on()
    time.sleep(0.5)
    assert not any(buffer.any() for buffer in transport._free[:free]), "a free buffer is written by nobody"
    mortal.kill()
    ends_at = time.monotonic() + 20
    while transport.num_free_buffers < 4 and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert transport.num_free_buffers == 4
    assert not into.any()


def test_an_owner_that_was_given_up_while_it_was_stopped_is_read_again(agent: FaultyAgent, mortal: Owner):
    transport = reader(agent, mortal, timeout_s=0.3)
    read(transport, mortal, [1])
    mortal.stop()
    with pytest.raises(TransportUnavailable):
        read(transport, mortal, [1])
    transport.forget(mortal.described.agent)
    transport.add(mortal.described)  # it is heard again, under a later epoch
    with pytest.raises(TransportUnavailable):
        read(transport, mortal, [1])
    mortal.go_on()
    ends_at = time.monotonic() + 10
    while transport.num_free_buffers < 4 and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert read(transport, mortal, [2])[0, 0] == 3
    assert transport.num_free_buffers == 4


def test_a_dead_owner_is_an_error_and_its_successor_is_read(agent: FaultyAgent, mortal: Owner, tmp_path: Path):
    transport = reader(agent, mortal)
    read(transport, mortal, [1])
    mortal.kill()
    refused(transport, mortal, TransportUnavailable)
    refused(transport, mortal, TransportUnavailable)
    transport.forget(mortal.described.agent)
    refused(transport, mortal, TransportUnavailable)
    again = Owner(tmp_path, mortal.described.agent + "-2")
    transport.add(again.described)
    assert read(transport, again, [3])[0, 0] == 4
    again.kill()


def test_an_owner_that_starts_anew_under_the_same_name_is_read(agent: FaultyAgent, mortal: Owner, tmp_path: Path):
    transport = reader(agent, mortal)
    read(transport, mortal, [1])
    mortal.kill()
    again = Owner(tmp_path, mortal.described.agent)
    transport.forget(mortal.described.agent)
    transport.add(again.described)
    assert read(transport, again, [3])[0, 0] == 4
    again.kill()


def test_an_owner_killed_while_it_is_read_gives_every_buffer_back(agent: FaultyAgent, tmp_path: Path):
    owner = Owner(tmp_path, f"killed-{time.monotonic_ns()}", num_blocks=64, block_bytes=1 << 20)
    transport = reader(agent, owner, timeout_s=3.0)
    into = np.zeros((64, 1 << 20), np.uint8)
    source = RemoteBlocks("there", owner.described.regions[0].segment, "m", range(64), [7] * 64)
    transport.read(source, into, range(64))
    owner.stop()
    pid = owner.process.pid
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
    with pytest.raises(TransportUnavailable):
        transport.read(source, into, range(64))
    killer.wait()
    owner.kill()
    ends_at = time.monotonic() + 20
    while transport.num_free_buffers < 4 and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert transport.num_free_buffers == 4


def test_every_sixteenth_operation_fails_and_no_wrong_byte_and_no_buffer_is_lost(
    agent: FaultyAgent, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nixl_transport, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(agent, "fail_every", 16)
    transport = reader(agent, owner)
    failed = 0
    for turn in range(64):
        blocks = [turn % 8, (turn + 3) % 8]
        try:
            assert read(transport, owner, blocks)[:, 7].tolist() == [block + 1 for block in blocks]
        except TransportUnavailable:
            failed += 1
            transport._peers[owner.described.agent].retry_at = 0
    assert 4 <= failed <= 12
    assert transport.num_free_buffers == 4


def test_a_description_that_can_not_be_true_is_refused(agent: FaultyAgent, owner: Owner):
    transport, said = reader(agent), owner.described
    region = said.regions[0]
    for wrong in (
        msgspec.structs.replace(said, metadata=b"no metadata"),
        msgspec.structs.replace(said, agent="somebody else"),
        msgspec.structs.replace(said, pattern_bytes=1 << 40),
        msgspec.structs.replace(said, regions=[msgspec.structs.replace(region, block_bytes=1 << 40)]),
        msgspec.structs.replace(said, regions=[msgspec.structs.replace(region, num_blocks=1 << 40)]),
        msgspec.structs.replace(said, regions=[msgspec.structs.replace(region, block_bytes=0)]),
    ):
        with pytest.raises(TransportUnavailable):
            transport.add(wrong)
    transport.add(msgspec.structs.replace(said, regions=[]))
    other = msgspec.structs.replace(said, agent="another", regions=[region])
    transport.add(said)
    with pytest.raises(TransportUnavailable, match="another worker's"):
        transport.add(other)
    moved = msgspec.structs.replace(region, blocks=region.blocks + (1 << 40))
    transport.add(msgspec.structs.replace(said, regions=[moved]))
    refused(transport, owner, TransportUnavailable)  # memory that was never registered can't be read


def test_a_path_that_damages_the_pattern_is_refused(agent: FaultyAgent, owner: Owner):
    transport = reader(agent)
    transport.add(msgspec.structs.replace(owner.described, pattern=owner.described.pattern + 1, pattern_bytes=1000))
    with pytest.raises(TransportUnavailable, match="damages"):
        transport.measure(owner.described.agent)


def test_an_idle_agent_leaves_its_core_alone(agent: FaultyAgent, owner: Owner):
    read(reader(agent, owner), owner, [1])
    clock = Path(f"/proc/{owner.process.pid}/stat")
    used = lambda: sum(map(int, clock.read_text().rsplit(") ", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")  # noqa: E731
    before = used()
    time.sleep(1.0)
    assert used() - before < 0.2


def test_pools_and_blocks_of_one_process_can_be_read_too(agent: FaultyAgent, tmp_path: Path):
    segment = Segment.create(tmp_path, "mine", num_blocks=8, block_bytes=BLOCK_BYTES, fingerprint="m")
    pool = BlockPool(8, 16, segment.generations)
    blocks = pool.allocate(3)
    segment.blocks[blocks] = 9
    memory = SharedMemory(NixlAgent("mine", transports="tcp"), [(segment, "m")])
    transport = reader(agent)
    transport.add(memory.describe(WorkerRef("prefill", "p", 1)))
    into = np.zeros((3, BLOCK_BYTES), np.uint8)
    transport.read(RemoteBlocks("there", "mine", "m", blocks, pool.generations_of(blocks)), into, range(3))
    assert (into == 9).all()
    transport.forget("mine")


def test_a_segment_that_is_closed_can_still_be_read_and_ends_nobody(agent: FaultyAgent, tmp_path: Path):
    segment = Segment.create(tmp_path, "closing", num_blocks=8, block_bytes=BLOCK_BYTES, fingerprint="m")
    segment.blocks[:] = 5
    own = NixlAgent("closing", transports="tcp")
    described = SharedMemory(own, [(segment, "m")]).describe(WorkerRef("prefill", "p", 1))
    transport = reader(agent)
    transport.add(described)
    segment.close()
    into = np.zeros((8, BLOCK_BYTES), np.uint8)
    transport.read(RemoteBlocks("there", "closing", "m", range(8), [0] * 8), into, range(8))
    assert (into == 5).all()
    assert transport.measure("closing") > 0
    transport.forget("closing")


def test_an_interface_that_is_not_there_is_a_clear_error():
    with pytest.raises(ConfigError, match="nixl_interface"):
        subprocess_agent("no-such-interface0")


def subprocess_agent(interface: str) -> None:
    """In a process of its own: UCX reads its settings once."""
    code = f"from common.transfer.nixl_agent import NixlAgent\nNixlAgent('x', interface={interface!r}, transports='tcp')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(ended.stderr)
