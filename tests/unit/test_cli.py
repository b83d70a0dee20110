"""The commands' own promises: clear errors, right process lists and right arithmetic."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.cli import bench, doctor, status
from common.cli.app import app
from common.cli.bench_report import percentile
from common.cli.demo import own_folder
from common.cli.fleet import Passed, processes, settled, threads_per_worker
from common.cli.gpus import visible_gpus
from common.cli.net import claimed_port, free_port, free_ports, http_status
from common.cli.starting import Starting
from common.cli.up_config import UpConfig
from common.models.source import DEFAULT_MODEL, ModelFiles
from common.protocol.cache_messages import KvTier
from common.protocol.draft_messages import Drafting
from common.protocol.errors import (
    ConfigError,
    NoWorkers,
)
from common.protocol.messages import KvUsage
from common.runtime import endpoints
from tests.unit.presences import presence

# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("cores", "engines", "threads"), [(1, 2, 1), (2, 2, 1), (4, 2, 2), (8, 2, 3), (64, 2, 8), (2, 5, 1)])
def test_cores_are_shared_out_among_the_compute_workers(cores: int, engines: int, threads: int) -> None:
    assert threads_per_worker(cores, engines) == threads


def test_up_starts_as_many_processes_as_were_asked_for() -> None:
    config = UpConfig(nats_url="nats://127.0.0.1:1", http_port=81, prefill=2, decode=3, draft=0)
    passed: Passed = {"prefill": {"dtype": "float32"}, "decode": {"dtype": "float32"}}
    specs = processes(settled(config, 0, 2), cores=2, passed=passed, config_file="penstock.toml")
    assert [spec.name for spec in specs] == [
        "gateway-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
        "kvstore-0",
    ]
    for spec in specs:
        assert spec.module == f"services.{spec.role}"
        assert spec.environment["PENSTOCK_NATS_URL"] == "nats://127.0.0.1:1"
        assert "--nats-url" not in spec.arguments, "a URL may hold a password"
        assert flag(spec.arguments, "--config") == "penstock.toml"
        assert flag(spec.arguments, "--http-port") == ("81" if spec.role == "gateway" else "0")
        assert ("--dtype" in spec.arguments) == (spec.role in ("prefill", "decode"))


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        ([], {}, {"decode-0": "", "kvstore-0": ""}),
        ([], {"prefill": 1}, {"prefill-0": "", "decode-0": "", "kvstore-0": ""}),
        ([0], {}, {"decode-0": "cuda:0 0.9"}),
        ([0, 1], {"decode": 2}, {"prefill-0": "cuda:0 0.45", "decode-0": "cuda:1 0.9", "decode-1": "cuda:0 0.45"}),
        ([3], {"prefill": 1, "kvstore": 1}, {"prefill-0": "cuda:3 0.45", "decode-0": "cuda:3 0.45", "kvstore-0": ""}),
    ],
)
def test_engines_are_shared_out_among_the_gpus(gpus: list[int], asked: dict[str, int], expected: dict[str, str]) -> None:
    config = UpConfig(nats_url="nats://127.0.0.1:1", http_port=81, draft=0, **asked)  # pyright: ignore[reportArgumentType]
    found = {}
    for spec in processes(settled(config, len(gpus), 2), cores=2, gpus=gpus)[1:]:
        names = [name for name in ("--device", "--gpu-memory-utilization") if name in spec.arguments]
        found[spec.name] = " ".join(flag(spec.arguments, name) for name in names)
    assert found == expected


@pytest.mark.parametrize(
    ("gpus", "cores", "expected"),
    [
        (0, 2, "decode kvstore"),
        (0, 8, "decode kvstore"),
        (0, 16, "prefill decode kvstore"),
        (1, 16, "decode"),
        (2, 16, "prefill decode"),
    ],
)
def test_by_default_engines_are_apart_only_where_each_has_a_device_of_its_own(gpus: int, cores: int, expected: str) -> None:
    config = settled(UpConfig(nats_url="nats://127.0.0.1:1", http_port=81), gpus, cores)
    specs = processes(config, cores=cores, gpus=range(gpus))
    assert [spec.role for spec in specs] == ["gateway", *expected.split()]
    threads = {spec.threads for spec in specs if spec.role in ("prefill", "decode")}
    assert threads == {min(cores, 8)}, "8-bit kernels may have every core"


def test_gpus_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus("cuda", devices=tmp_path) == [0, 1]
    assert visible_gpus("cuda:1", devices=tmp_path) == [1]
    assert visible_gpus("cpu", devices=tmp_path) == []
    monkeypatch.setattr("common.cli.gpus.torch_is_for_cpus", lambda: False)
    assert visible_gpus("auto", devices=tmp_path) == [0, 1]
    assert visible_gpus("auto", devices=tmp_path / "none") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert visible_gpus("cuda", devices=tmp_path) == [0]
    for wrong in ("cuda:1", "gpu", "cpu:0", "cuda:x"):
        with pytest.raises(ConfigError):
            visible_gpus(wrong, devices=tmp_path)


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_port_in_use_is_named_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use.*--http-port"), claimed_port(port, "--http-port"):
            pass
    with claimed_port(port, "--http-port") as claimed:
        assert claimed == port


def test_a_port_that_was_chosen_stays_the_gateway_s_until_it_listens_and_when_it_is_started_again() -> None:
    with claimed_port(0, "--http-port") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for reuse_port in (False, True, False):
            gateways = [endpoints.bind("127.0.0.1", port, reuse_port=reuse_port) for _ in range(1 + reuse_port)]
            for gateway in gateways:
                gateway.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
            for gateway in gateways:
                gateway.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_shared_memory_that_can_not_be_written_is_named_with_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    ended = CliRunner().invoke(app, ["up", "--shm-dir", str(tmp_path)])
    assert isinstance(ended.exception, ConfigError) and "choose another with --shm-dir" in str(ended.exception)


async def test_nothing_listening_is_status_zero() -> None:
    assert await http_status(free_port(), "/ready") == 0


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_a_gateway_is_asked_by_the_address_that_it_listens_on(host: str, named: str) -> None:
    try:
        listener = await anyio.create_tcp_listener(local_host=host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            status = 200 if f"Host: {named}:{port}\r\n".encode() in await stream.receive() else 421
            await stream.send(f"HTTP/1.1 {status} \r\n\r\n".encode())

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        assert await http_status(port, "/ready", host=host) == 200
        group.cancel_scope.cancel()


def test_errors_are_one_line_without_a_traceback() -> None:
    """All commands at once: some look for a server for seconds."""
    cases = [
        (["up", "--model", "no-such-model"], "model_not_found"),
        (["up", "--prefill", "-1"], "--prefill: expected int >= 0"),
        (["up", "--decode", "0"], "--decode 0: nobody would write answers"),
        (["up", "--dtype", "int3"], "--dtype: expected one of auto, float32"),
        (["up", "--http-host", "192.0.2.1"], "can't listen on 192.0.2.1"),
        (["up", "--config", "missing.toml"], "missing.toml"),
        (["up", "--api-key-file", "missing"], "can't read missing, which is to hold the API key"),
        (["up", "--http-port", "0", "--nats-url", "nats://127.0.0.1:9"], "leave --nats-url out"),
        (["generate", "hello", "--nats-url", "nats://127.0.0.1:9"], "penstock up"),
        (["generate", "hello", "--tool-choice", "required"], "--tool-choice required chooses of --tools: give both"),
    ]

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "common.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    with ThreadPoolExecutor(len(cases)) as threads:
        ended = list(threads.map(run, [arguments for arguments, _ in cases]))
    for (arguments, message), found in zip(cases, ended, strict=True):
        assert found.returncode == 1, arguments
        assert message in found.stderr and found.stderr.count("\n") == 1, (arguments, found.stderr)
        assert "Traceback" not in found.stderr and not found.stdout, arguments


def test_commands_start_without_numpy() -> None:
    program = "import sys, common.cli.app; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


PRESSED_WHILE_IMPORTING = """
import sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from common.cli.main import main
main()
"""


def test_ctrl_c_is_quiet_from_the_start() -> None:
    ended = subprocess.run([sys.executable, "-c", PRESSED_WHILE_IMPORTING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_locale_without_a_character_and_a_closed_stdout_end_no_command() -> None:
    penstock = f"{sys.executable} -m common.cli"
    for line in (f"PYTHONIOENCODING=ascii {penstock} up --help | tail -1", f"{penstock} --version >&-"):
        ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, ""), line


# ── bench, status, doctor ────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([], 50) == 0


def test_bench_prompts_have_the_asked_length_and_differ_from_the_first_word() -> None:
    prompts = [bench.prompt_of(number, 20) for number in range(5)]
    assert all(len(prompt.split()) == 20 for prompt in prompts)
    assert len({prompt.split()[0] for prompt in prompts}) == 5


async def test_the_closed_loop_runs_every_request_once_and_counts_failures() -> None:
    asked: list[int] = []

    async def ask(number: int) -> bench.Timing:
        asked.append(number)
        if number == 3:
            raise NoWorkers("none")
        return bench.Timing(started=0.0, first=1.0, last=2.0, tokens=11)

    report = await bench.closed_loop(ask, requests=10, concurrency=4)
    assert sorted(asked) == list(range(10))
    assert (len(report.timings), report.failed) == (9, 1)
    assert report.timings[0].itl_s == pytest.approx(0.1)


def test_status_lists_workers_along_the_way_of_a_request() -> None:
    workers = [presence("kvstore"), presence("decode", 1), presence("gateway"), presence("decode", 0), presence("prefill")]
    ordered = [worker.worker.id for worker in status.in_order(workers)]
    assert ordered == ["gateway-0", "prefill-0", "decode-0", "decode-1", "kvstore-0"]


def test_status_as_json_names_every_field() -> None:
    fields = status.as_fields(presence("decode", kv=KvUsage(total=8, free=5, owned=3)))
    assert fields["worker"] == {"role": "decode", "id": "decode-0", "epoch": 1}
    assert fields["kv"] == {"total": 8, "free": 5, "owned": 3, "leased": 0, "cached": 0, "groups": []}
    msgspec.json.encode(fields)


def test_status_speaks_of_the_fullest_cache_group() -> None:
    groups = [KvUsage(total=900, free=890, owned=10), KvUsage(total=100, free=20, owned=70, leased=6, cached=4)]
    worker = presence("decode", kv=KvUsage(total=1000, free=910, owned=80, leased=6, cached=4, groups=groups))
    said = status.as_fields(worker)["kv"]
    assert isinstance(said, dict)
    assert said["groups"][1] == {"total": 100, "free": 20, "owned": 70, "leased": 6, "cached": 4}
    console = Console(width=80, record=True)
    console.print(status.table([worker]))
    assert " 76% " in console.export_text()


def test_status_cuts_no_number_on_a_narrow_terminal() -> None:
    console = Console(record=True, width=20)
    console.print(status.table([presence("decode", credits=2912)], console.width), crop=False)
    shown = console.export_text()
    assert "2912" in shown and "ready" in shown


def test_status_says_what_speculation_gave_where_there_is_any() -> None:
    workers = [presence("decode", 0), presence("decode", 1)]
    console = Console(width=80, record=True)
    console.print(status.table(workers))
    assert "speculation" not in console.export_text()
    replace = msgspec.structs.replace
    said = [replace(worker, draft_tokens=10_000, accepted_tokens=4000 + 2000 * rank) for rank, worker in enumerate(workers)]
    console.print(status.table(said))
    assert "speculation: 50% of 20k proposed tokens accepted" in console.export_text()


def test_status_says_what_draft_workers_draft_with_and_how_busy_they_are() -> None:
    replace = msgspec.structs.replace
    drafts = [
        replace(presence("draft", 0), running=1, drafting=Drafting(busy_share=0.124)),
        replace(presence("draft", 1), running=7, drafting=Drafting("small", 0.5)),
    ]
    console = Console(width=80, record=True)
    console.print(status.table([presence("decode", 0), *drafts]))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert f"{drafts[0].worker.id}: n-grams, 1 sequence, busy 12% of the time" in lines
    assert f"{drafts[1].worker.id}: small, 7 sequences, busy 50% of the time" in lines


def test_status_says_why_a_draft_worker_drafts_nothing() -> None:
    problem = "shard 1 of the weights is cut short"
    draft = msgspec.structs.replace(presence("draft"), drafting=Drafting("small", problem=problem))
    console = Console(width=120, record=True)
    console.print(status.table([draft]))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert lines[-1] == f"{draft.worker.id}: drafts nothing: {problem}"
    assert status.as_fields(draft)["drafting"] == {"model": "small", "busy_share": 0.0, "problem": problem, "longest": 0}


def test_up_says_that_a_kvstore_can_not_use_its_disk() -> None:
    starting = Starting([], [])
    starting.heard(
        presence("kvstore", tiers=[KvTier(name="memory", blocks=4), KvTier(name="disk", problem="/kv can't be written")])
    )
    assert starting.problems == ["kvstore-0 keeps no blocks on disk: /kv can't be written"]


def test_status_says_what_each_tier_of_a_kvstore_holds() -> None:
    memory = KvTier(name="memory", blocks=20, bytes=5 << 20, capacity_bytes=1 << 30, hit_blocks=7)
    disk = KvTier(
        name="disk", blocks=1200, bytes=3 << 30, capacity_bytes=16 << 30, evicted_blocks=4, queued_blocks=2, damaged_blocks=1
    )
    store = msgspec.structs.replace(presence("kvstore"), tiers=[memory, disk])
    console = Console(width=120, record=True)
    console.print(status.table([store]))
    said = console.export_text()
    assert "kvstore-0: memory 20 blocks, 5.0 MiB of 1.0 GiB\n  7 hits\n" in said
    assert "kvstore-0: disk 1,200 blocks, 3.0 GiB of 16.0 GiB\n  0 hits, 4 evicted, 2 to write, 1 damaged" in said
    off = msgspec.structs.replace(store, tiers=[KvTier(name="disk", problem="/kv is used by another kvstore")])
    console.print(status.table([off]))
    assert "kvstore-0: disk off: /kv is used by another kvstore" in console.export_text()
    msgspec.json.encode(status.as_fields(store))


def test_every_finding_that_is_not_ok_says_what_to_do(
    tmp_path: Path, smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", "/dev/null/kernels")
    taken = socket.create_server(("127.0.0.1", 0))
    findings = [
        doctor.check_kernels(),
        doctor.check_shm(tmp_path / "missing"),
        doctor.check_cores(1),
        doctor.check_open_files(1024),
        doctor.check_port(taken.getsockname()[1]),
        doctor.check_model("no-such-model", tmp_path, {}),
        doctor.check_model(DEFAULT_MODEL, tmp_path, {"PENSTOCK_KV_CACHE_MB": "1"}),
        doctor.check_environment({"PENSTOCK_NATS_ULR": "nats://10.0.0.1:4222"}),
        doctor.check_kvstore(tmp_path, {"PENSTOCK_CAPACITY_MB": "much"}, 0),
        doctor.check_kvstore(tmp_path, {"PENSTOCK_CAPACITY_MB": str(1 << 30)}, 0),
    ]
    taken.close()
    assert all(finding.level != "ok" for finding in findings)
    assert all(finding.advice for finding in findings)


def test_a_healthy_machine_has_nothing_to_complain_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path / "kernels"))
    findings = [doctor.check_python(), doctor.check_torch(), doctor.check_cores(2), doctor.check_stale(tmp_path)]
    findings.append(doctor.check_kernels())
    findings.append(doctor.check_environment({"PENSTOCK_HOME": "/srv", "PATH": "/bin"}))
    findings += [doctor.check_kvstore(tmp_path, {"PENSTOCK_CAPACITY_MB": "1"}, num_gpus) for num_gpus in (0, 1)]
    assert "GPUs" not in findings[-2].found and "path device" in findings[-1].found
    assert {finding.level for finding in findings} == {"ok"}


@pytest.mark.parametrize("command", ["", "up", "pull", "generate", "chat", "status", "bench", "doctor", "demo"])
def test_every_command_can_be_asked_for_help(command: str) -> None:
    asked = [sys.executable, "-m", "common.cli", *command.split(), "--help"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: " in ended.stdout
    assert "[/dev/shm]" in ended.stdout or command != "up", "defaults are not taken for markup"


def test_free_ports_are_no_two_alike() -> None:
    assert len(set(free_ports(200))) == 200


def test_a_demo_removes_what_a_killed_one_left_and_not_what_a_running_one_has(tmp_path: Path) -> None:
    script = """
import sys, time
from common.cli.demo import own_folder
with own_folder(sys.argv[1], "demo-"):
    print("there", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None and killed.stdout.readline()
        with own_folder(str(tmp_path), "demo-"):
            assert len(list(tmp_path.iterdir())) == 2
        killed.kill()
    assert len(list(tmp_path.iterdir())) == 1
    with own_folder(str(tmp_path), "demo-") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())
