"""Settings of KV between hosts: off by default, and nothing of NIXL is loaded then; a mistake is a clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from common.engine.engine import Engine
from common.protocol.errors import ConfigError
from common.protocol.messages import Presence
from common.runtime.metrics import Metrics
from common.testing.memory_bus import MemoryBroker
from common.transfer.measured import TransferCounts
from common.transfer.nixl_agent import NixlAgent, ucx_transports
from common.worker.remote_kv import RemoteKv
from common.worker.store_client import StoreClient
from services.decode.config import DecodeConfig
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig

NO_STORE = object.__new__(StoreClient)


def remote_kv(tmp_path: object, **settings: object) -> RemoteKv:
    actor = KvstoreActor(bus=MemoryBroker().connect("x"), config=KvstoreConfig(shm_dir=str(tmp_path)))
    return RemoteKv(actor, msgspec.convert(settings, DecodeConfig), TransferCounts(Metrics(role="decode")))


async def test_kv_stays_on_the_host_by_default(tmp_path: object):
    kv = remote_kv(tmp_path)
    engine = object.__new__(Engine)
    await kv.open(engine, NO_STORE)
    assert kv.endpoints == []
    assert b"kv_path" not in kv._actor.metrics.render()


def test_nixl_is_not_imported_by_default():
    code = (
        "import sys, services.decode.actor, services.prefill.actor; assert not any(m.startswith('nixl') for m in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_gpu_that_is_to_have_no_stage_is_refused(tmp_path: object):
    engine = object.__new__(Engine)
    engine.on_gpu, engine.stage = True, None
    with pytest.raises(ConfigError, match="kv_stage_mb"):
        await remote_kv(tmp_path, kv_transfer="nixl", kv_stage_mb=0).open(engine, NO_STORE)


async def test_a_gpu_whose_stage_the_system_refused_keeps_its_kv_on_its_host(tmp_path: object):
    engine = object.__new__(Engine)
    engine.on_gpu, engine.stage = True, None
    kv = remote_kv(tmp_path, kv_transfer="nixl")
    with capture_logs() as logs:
        await kv.open(engine, NO_STORE)
    assert [line["event"] for line in logs] == ["kv_endpoint_unavailable"]
    assert kv.endpoints == []


def test_an_unknown_transfer_is_refused():
    with pytest.raises(msgspec.ValidationError, match="kv_transfer"):
        msgspec.convert({"kv_transfer": "carrier pigeon"}, DecodeConfig)


def test_a_heartbeat_of_an_older_version_has_no_endpoints():
    said = msgspec.msgpack.encode({"type": "Presence", "worker": ["decode", "d", 1], "state": "ready"})
    assert msgspec.msgpack.decode(said, type=Presence).endpoints == []


async def test_a_kvstore_without_nixl_says_so_at_its_start(tmp_path: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    store = KvstoreActor(bus=MemoryBroker().connect("x"), config=KvstoreConfig(shm_dir=str(tmp_path), kv_transfer="nixl"))
    with pytest.raises(ConfigError, match=r"penstock\[nixl\]"):
        await store.readers.open()
    assert store.readers.endpoints == [] and store.readers.free_bytes == 0


def test_a_missing_nixl_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"penstock\[nixl\]"):
        NixlAgent("x")


@pytest.mark.parametrize(
    ("setting", "beside_a_gpu"),
    [
        ("tcp", "tcp,cuda_copy"),
        ("rc,sm", "rc,sm,cuda_copy"),
        ("tcp,cuda", "tcp,cuda"),
        ("tcp,cuda_copy", "tcp,cuda_copy"),
        ("all", "all"),
        ("^ib", "^ib"),
        ("", ""),
    ],
)
def test_transports_beside_a_gpu_have_what_nixl_asks_for(tmp_path: Path, setting: str, beside_a_gpu: str):
    """NIXL ended with NIXL_ERR_BACKEND where a machine with a GPU was to use TCP alone."""
    add_device(tmp_path, "0000:00:04.0", "0x10de", "0x040300")  # its sound
    add_device(tmp_path, "0000:00:05.0", "0x8086", "0x030000")
    (tmp_path / "0000:00:07.0").mkdir()
    assert ucx_transports(setting, tmp_path) == setting
    add_device(tmp_path, "0000:00:06.0", "0x10de", "0x030200")
    assert ucx_transports(setting, tmp_path) == beside_a_gpu
    assert ucx_transports(setting, tmp_path / "missing") == setting


def add_device(folder: Path, name: str, vendor: str, kind: str) -> None:
    (folder / name).mkdir()
    (folder / name / "vendor").write_text(f"{vendor}\n")
    (folder / name / "class").write_text(f"{kind}\n")
