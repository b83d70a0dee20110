"""The commands' own promises: clear errors, right process lists, right arithmetic, and a client that cleans up."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest

from common.cli import bench, doctor, status
from common.cli.client import ChatStream, served_model, watch_presence
from common.cli.console import first_error
from common.cli.fleet import Passed, UpConfig, processes, settled, threads_per_worker
from common.cli.gpus import visible_gpus
from common.cli.net import claim_port, free_port, http_status
from common.models.source import DEFAULT_MODEL, ModelFiles
from common.protocol import headers, messages, subjects
from common.protocol.errors import (
    ConfigError,
    ContextLengthExceeded,
    NoWorkers,
    ProtocolError,
    RequestTimeout,
    UnknownModel,
)
from common.protocol.handles import WorkerRef
from common.protocol.messages import KvUsage, Presence
from common.runtime.bus import Bus, BusMessage
from common.runtime.memory_bus import MemoryBroker


def presence(role: str, number: int = 0, **fields: object) -> Presence:
    reference = WorkerRef(role=role, id=f"{role}-{number}", epoch=1)  # pyright: ignore[reportArgumentType]
    return Presence(worker=reference, **({"state": "ready", "model": "tiny"} | fields))  # pyright: ignore[reportArgumentType]


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
        with pytest.raises(ConfigError, match=f"port {port} is in use.*--http-port"):
            claim_port(port, "--http-port")
    assert claim_port(port, "--http-port") == port
    assert claim_port(0, "--http-port") > 0


async def test_nothing_listening_is_status_zero() -> None:
    assert await http_status(free_port(), "/ready") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--model", "no-such-model"], "model_not_found"),
        (["up", "--prefill", "-1"], "--prefill: expected int >= 0"),
        (["up", "--decode", "0"], "--decode 0: nobody would write answers"),
        (["up", "--dtype", "int3"], "--dtype: expected one of auto, float32"),
        (["up", "--http-host", "192.0.2.1"], "can't listen on 192.0.2.1"),
        (["up", "--config", "missing.toml"], "missing.toml"),
        (["up", "--http-port", "0", "--nats-url", "nats://127.0.0.1:9"], "leave --nats-url out"),
        (["generate", "hello", "--nats-url", "nats://127.0.0.1:9"], "penstock up"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "common.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert message in ended.stderr and ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.stderr and not ended.stdout


# ── the NATS client ──────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeGateway:
    """Answers each chat request with the given replies, and remembers cancels."""

    def __init__(self, bus: Bus, replies: list[tuple[dict[str, str], bytes]]) -> None:
        self.bus = bus
        self.replies = replies
        self.requests: list[BusMessage] = []
        self.cancelled: list[str] = []
        self._waiting: list[BusMessage] = []

    async def start(self) -> None:
        await self.bus.subscribe(subjects.any_chat(), self._waiting.append, queue=subjects.GATEWAY_QUEUE)
        await self.bus.subscribe(subjects.any_cancel(), lambda m: self.cancelled.append(subjects.last_token(m.subject)))

    async def answer(self) -> None:
        await anyio.sleep(0.01)  # what was published is delivered in a later turn of the loop
        while self._waiting:
            request = self._waiting.pop(0)
            self.requests.append(request)
            for fields, data in self.replies:
                await self.bus.publish(request.reply, data, headers=fields)


def text_chunk(text: str) -> bytes:
    return msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": text}}]})


LAST = msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


async def talk(replies: list[tuple[dict[str, str], bytes]], *, timeout_s: float = 5) -> tuple[str, ChatStream, FakeGateway]:
    broker = MemoryBroker()
    gateway = FakeGateway(broker.connect("gateway"), replies)
    await gateway.start()
    bus = broker.connect("client")
    parts: list[str] = []
    async with ChatStream(bus, "Tiny/Model", {"messages": []}, timeout_s=timeout_s) as stream:
        await gateway.answer()
        async for chunk in stream:
            parts.append(chunk.text)
    return "".join(parts), stream, gateway


async def test_a_stream_yields_its_text_and_counts_the_servers_tokens() -> None:
    text, stream, gateway = await talk(
        [
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "2", headers.FINAL: "1"}, LAST),
        ]
    )
    assert text == "Hello"
    assert stream.timing.tokens == 2
    assert gateway.requests[0].subject == "penstock.v1.chat.tiny-model"
    assert gateway.requests[0].headers[headers.REQUEST_ID] == stream.request_id
    assert msgspec.json.decode(gateway.requests[0].data)["stream"] is True
    assert gateway.cancelled == []


async def test_an_error_header_becomes_the_error_it_names() -> None:
    failed = {headers.FINAL: "1", headers.ERROR_CODE: "context_length_exceeded", headers.ERROR: "the prompt is too long"}
    with pytest.raises(ContextLengthExceeded, match="too long"):
        await talk([(failed, b"")])


async def test_a_reply_that_is_sent_again_counts_once() -> None:
    text, stream, _ = await talk(
        [
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "2", headers.FINAL: "1"}, LAST),
        ]
    )
    assert text == "Hello" and stream.timing.tokens == 2


async def test_a_number_that_is_none_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="numbered 'two'"):
        await talk([({headers.SEQUENCE: "two"}, text_chunk("Hel"))])


async def test_a_gap_in_the_sequence_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="lost"):
        await talk([({headers.SEQUENCE: "0"}, text_chunk("a")), ({headers.SEQUENCE: "2"}, text_chunk("c"))])


async def test_silence_ends_in_a_timeout_and_cancels_the_request() -> None:
    broker = MemoryBroker()
    gateway = FakeGateway(broker.connect("gateway"), [])
    await gateway.start()
    stream = ChatStream(broker.connect("client"), "tiny", {"messages": []}, timeout_s=0.05)
    with pytest.raises(RequestTimeout, match="penstock status"):
        async with stream:
            await anext(stream)
    await gateway.answer()
    assert gateway.cancelled == [stream.request_id]


async def test_a_request_that_nobody_hears_says_how_to_start() -> None:
    with pytest.raises(NoWorkers, match="penstock up"):
        async with ChatStream(MemoryBroker().connect("client"), "tiny", {"messages": []}, timeout_s=5) as stream:
            await anext(stream)


async def test_a_model_that_nobody_serves_names_those_that_are() -> None:
    broker = MemoryBroker()
    bus, gateways = broker.connect("client"), broker.connect("gateways")

    async def beat() -> None:
        while True:
            for number, (role, model) in enumerate((("gateway", "Org/A"), ("gateway", "b"), ("decode", "c"))):
                said = presence(role, number, model=model)  # pyright: ignore[reportArgumentType]
                await gateways.publish(subjects.presence(role, said.worker.id), messages.encode(said))
            await anyio.sleep(0.05)

    async def ask(model: str) -> None:
        async with ChatStream(bus, model, {"messages": []}, timeout_s=5) as stream:
            await anext(stream)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        with pytest.raises(UnknownModel, match="'gpt-5' is not served on this bus; Org/A, b are"):
            await ask("gpt-5")
        with pytest.raises(NoWorkers, match="the gateway of 'b' takes no requests now"):
            await ask("b")
        group.cancel_scope.cancel()


async def test_the_served_model_is_what_a_ready_gateway_says() -> None:
    broker = MemoryBroker()
    bus, gateway = broker.connect("client"), broker.connect("gateway")

    async def beat() -> None:
        for state in ("starting", "ready"):
            beat = presence("gateway", state=state, model=f"model-{state}")
            await gateway.publish(subjects.presence("gateway", "gateway-0"), messages.encode(beat))

    heard: list[str] = []
    await bus.subscribe(subjects.any_presence(), lambda message: heard.append(message.subject))

    async with anyio.create_task_group() as tasks:

        async def beat_soon() -> None:
            await anyio.sleep(0.05)
            await beat()

        tasks.start_soon(beat_soon)
        assert await served_model(bus) == "model-ready"
    assert await served_model(bus, "mine") == "mine"
    assert len(heard) == 2


async def served_beside(*models: str, wanted: str = "") -> str:
    """What a command would ask for on a bus whose gateways serve `models`."""
    broker = MemoryBroker()
    bus, gateways = broker.connect("client"), broker.connect("gateways")
    found = ""

    async with anyio.create_task_group() as tasks:

        async def beat() -> None:
            for _ in range(40):
                for number, model in enumerate(models):
                    beat = presence("gateway", number, model=model)
                    await gateways.publish(subjects.presence("gateway", f"gateway-{number}"), messages.encode(beat))
                await anyio.sleep(0.05)

        tasks.start_soon(beat)
        found = await served_model(bus, wanted)
        tasks.cancel_scope.cancel()
    return found


async def test_of_several_models_one_must_be_chosen() -> None:
    assert await served_beside("a", "a") == "a"
    assert await served_beside("a", "b", wanted="b") == "b"
    with pytest.raises(BaseExceptionGroup) as raised:
        await served_beside("b", "a")
    assert "this bus serves a, b: choose one with --model" in str(first_error(raised.value))


async def test_a_path_means_the_model_that_it_is_served_as() -> None:
    assert await served_beside("my-model", wanted="./models/my-model.gguf") == "my-model"
    assert await served_beside("Qwen/Qwen3-0.6B", wanted="Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert await served_beside("my-model", wanted="/srv/my-model/") == "my-model"


async def test_noise_on_the_presence_subject_is_ignored() -> None:
    broker = MemoryBroker()
    bus, other = broker.connect("client"), broker.connect("other")

    async with anyio.create_task_group() as tasks:

        async def publish_noise() -> None:
            await anyio.sleep(0.02)
            await other.publish(subjects.presence("decode", "decode-0"), b"\xff not msgpack")

        tasks.start_soon(publish_noise)
        assert await watch_presence(bus, 0.1) == {}


# ── bench, status, doctor ────────────────────────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [bench.percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert bench.percentile([], 50) == 0


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
    assert fields["kv"] == {"total": 8, "free": 5, "owned": 3, "leased": 0, "cached": 0}
    msgspec.json.encode(fields)


def test_every_finding_that_is_not_ok_says_what_to_do(tmp_path: Path, smollm2: ModelFiles) -> None:
    findings = [
        doctor.check_shm(tmp_path / "missing"),
        doctor.check_cores(1),
        doctor.check_open_files(1024),
        doctor.check_model("no-such-model", tmp_path, {}),
        doctor.check_model(DEFAULT_MODEL, tmp_path, {"PENSTOCK_KV_CACHE_MB": "1"}),
        doctor.check_environment({"PENSTOCK_NATS_ULR": "nats://10.0.0.1:4222"}),
    ]
    assert all(finding.level != "ok" for finding in findings)
    assert all(finding.advice for finding in findings)


def test_a_healthy_machine_has_nothing_to_complain_about(tmp_path: Path) -> None:
    findings = [doctor.check_python(), doctor.check_torch(), doctor.check_cores(2), doctor.check_stale(tmp_path)]
    findings.append(doctor.check_environment({"PENSTOCK_HOME": "/srv", "PATH": "/bin"}))
    assert {finding.level for finding in findings} == {"ok"}


@pytest.mark.parametrize("command", ["", "up", "pull", "generate", "chat", "status", "bench", "doctor", "demo"])
def test_every_command_can_be_asked_for_help(command: str) -> None:
    asked = [sys.executable, "-m", "common.cli", *command.split(), "--help"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: " in ended.stdout
    assert "[/dev/shm]" in ended.stdout or command != "up", "defaults are not taken for markup"
