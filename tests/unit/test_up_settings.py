"""One definition of each setting: what a flag, a variable and a file say reaches the processes that it is for, the strongest
first, and no password stands on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.cli import up_settings
from common.cli.fleet import ProcessSpec, check_disk, processes, settled
from common.cli.up_settings import UpSettings
from common.engine.settings import check_objectives
from common.protocol.errors import ConfigError
from common.runtime import config as configuration
from common.runtime import flags_elsewhere
from common.runtime.sections import ROLES, config_type, service_fields, up_fields
from common.runtime.settings import ServiceConfig

FIVE = ("--prefill=1", "--decode=1", "--draft=1", "--kvstore=1")


def asked(*argv: str, environ: Mapping[str, str] | None = None, file: str = "", folder: Path | None = None) -> UpSettings:
    """What `penstock up argv…` reads. `file`: the text of a TOML file in `folder`."""
    flags = list(argv)
    if file:
        assert folder is not None
        (folder / "penstock.toml").write_text(file)
        flags += ["--config", str(folder / "penstock.toml")]
    found = up_settings.read(flags, environ or {})
    assert found is not None
    return found


def started(settings: UpSettings) -> dict[str, ProcessSpec]:
    """What would be started, by name, on two cores and no GPU, with the bus on port 4222."""
    config = settled(settings.config, 0, 2)
    config = msgspec.structs.replace(config, nats_url=config.nats_url or "nats://127.0.0.1:4222")
    specs = processes(config, cores=2, passed=settings.passed, services=settings.services, config_file=settings.config_file)
    return {spec.name: spec for spec in specs}


def children(settings: UpSettings, environ: Mapping[str, str] | None = None) -> dict[str, ServiceConfig]:
    """The settings that each role's process comes to, by the code that a service itself runs."""
    found: dict[str, ServiceConfig] = {}
    for spec in started(settings).values():
        kind = config_type(spec.role)
        environment = {**(environ or {}), **spec.environment}
        found[spec.role] = configuration.load(kind, section=spec.role, argv=spec.arguments, environ=environment)
    return found


# ── precedence ───────────────────────────────────────────────────────────────────────────────────────────────────────────

FILE = {
    "common": "[common]\nlease_s = 11\n",
    "up": "[up]\nlease_s = 12\n",
    "role": "[decode]\nlease_s = 13\n[prefill]\nlease_s = 13\n[gateway]\nlease_s = 13\n",
}


@pytest.mark.parametrize(
    ("flag", "variable", "tables", "expected"),
    [
        (False, False, (), 5.0),
        (False, False, ("common",), 11.0),
        (False, False, ("common", "up"), 12.0),
        (False, False, ("common", "up", "role"), 13.0),
        (False, True, ("common", "up", "role"), 14.0),
        (True, True, ("common", "up", "role"), 15.0),
        (True, False, (), 15.0),
        (False, True, (), 14.0),
    ],
)
def test_a_flag_beats_a_variable_beats_the_roles_table_beats_up_beats_common(
    flag: bool, variable: bool, tables: tuple[str, ...], expected: float, tmp_path: Path
) -> None:
    environ = {"PENSTOCK_LEASE_S": "14"} if variable else {}
    flags = ["--lease-s", "15"] if flag else []
    settings = asked(*FIVE, *flags, environ=environ, file="".join(FILE[table] for table in tables), folder=tmp_path)
    found = children(settings, environ)
    assert {role: found[role].lease_s for role in ("gateway", "prefill", "decode")} == dict.fromkeys(
        ("gateway", "prefill", "decode"), expected
    )


@pytest.mark.parametrize("where", ["flag", "variable", "common-less role table", "up table"])
def test_a_setting_of_some_roles_goes_to_these(where: str, tmp_path: Path) -> None:
    flags = ["--max-running", "7"] if where == "flag" else []
    environ = {"PENSTOCK_MAX_RUNNING": "7"} if where == "variable" else {}
    file = {"up table": "[up]\nmax_running = 7\n", "common-less role table": "[decode]\nmax_running = 7\n"}.get(where, "")
    settings = asked(*FIVE, *flags, environ=environ, file=file, folder=tmp_path)
    found: dict[str, Any] = children(settings, environ)
    assert found["decode"].max_running == 7
    assert found["prefill"].max_running == (0 if where == "common-less role table" else 7)
    for name in ("gateway-0", "kvstore-0"):
        assert "--max-running" not in started(settings)[name].arguments


def test_every_setting_of_every_service_is_a_flag_and_reaches_whom_it_is_for() -> None:
    """By its default, so that any type will do."""
    offered = up_settings.offered()
    for role in ROLES:
        assert set(service_fields(role)) - set(offered) == up_settings.NOT_OFFERED
    for name, field in offered.items():
        if name in up_fields():
            continue
        argv = [f"{field.flag}={configuration.as_text(field.default)}"]
        passed = asked(*argv).passed
        assert {role for role in ROLES if name in passed[role]} == {role for role in ROLES if name in service_fields(role)}


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ((), None),
        (("--kvstore=0",), "none would be started"),
        (("--kvstore=2",), "2 would be started"),
        (("--zero-retention",), "--zero-retention forbids"),
    ],
)
def test_a_folder_for_kv_needs_one_store_that_may_keep_it(flags: tuple[str, ...], refusal: str | None) -> None:
    settings = asked("--kv-disk=/kv", "--kv-disk-gb=3", *flags)
    store: Any = settings.services["kvstore"]
    assert (store.kv_disk, store.kv_disk_gb) == ("/kv", 3)
    config = settled(settings.config, num_gpus=0, cores=2)
    if refusal is None:
        check_disk(config, settings.services)
        return
    with pytest.raises(ConfigError, match=refusal):
        check_disk(config, settings.services)


def test_zero_retention_forbids_a_store() -> None:
    def check(*flags: str) -> None:
        settings = asked("--zero-retention", *flags)
        check_disk(settled(settings.config, num_gpus=0, cores=2), settings.services)

    check()
    with pytest.raises(ConfigError, match="--kvstore 1 keeps KV"):
        check("--kvstore=1")


def test_prompts_are_not_parted_by_load_where_they_are_to_be_parted_alike() -> None:
    check_objectives(asked("--slo-itl-ms=20", "--slo-ttft-ms=500").services["decode"])
    with pytest.raises(ConfigError, match="leave one out"):
        check_objectives(asked("--slo-itl-ms=20", "--batch-invariant").services["decode"])


def test_flags_that_the_readme_names() -> None:
    settings = asked(
        *("--api-key=k", "--quantization-max-loss=0", "--served-model-name=Org/M 1", "--gpu-memory-utilization=0.5"),
        *("--max-running=3", "--max-model-len=1000", "--no-canary", "--kv-cache-mb", "64", "--prefill=1", "--draft=1"),
    )
    found: dict[str, Any] = children(settings)
    assert set(found) == set(ROLES)
    assert found["gateway"].api_key == "k" and found["gateway"].canary is False
    assert {found[role].served_name for role in ROLES} == {"Org/M 1"}
    assert {found[role].max_model_len for role in ("gateway", "prefill", "decode")} == {1000}
    for role in ("prefill", "decode"):
        engine = found[role]
        assert (engine.quantization_max_loss, engine.gpu_memory_utilization) == (0, 0.5)
        assert (engine.max_running, engine.kv_cache_mb) == (3, 64)


# ── which bus ────────────────────────────────────────────────────────────────────────────────────────────────────────────

URL = "nats://10.0.0.1:4222"


@pytest.mark.parametrize(
    ("flags", "environ", "file", "url"),
    [
        ((), {}, "", ""),
        ((), {"PENSTOCK_NATS_URL": URL}, "", URL),
        (("--nats-port", "5000"), {"PENSTOCK_NATS_URL": URL}, "", ""),
        (("--nats-port", "5000"), {}, f'[common]\nnats_url = "{URL}"\n', ""),
        (("--nats-url", URL), {"PENSTOCK_NATS_PORT": "5000"}, "", URL),
        ((), {"PENSTOCK_NATS_PORT": "5000"}, f'[common]\nnats_url = "{URL}"\n', ""),
        ((), {"PENSTOCK_NATS_URL": URL}, "[up]\nnats_port = 5000\n", URL),
        ((), {"PENSTOCK_NATS_PORT": "5000", "PENSTOCK_NATS_URL": URL}, "", URL),
        (("--nats-url", ""), {"PENSTOCK_NATS_URL": URL}, "", ""),
    ],
)
def test_naming_a_port_to_start_a_bus_on_means_starting_it(
    flags: tuple[str, ...], environ: dict[str, str], file: str, url: str, tmp_path: Path
) -> None:
    settings = asked(*flags, environ=environ, file=file, folder=tmp_path)
    assert settings.config.nats_url == url


def test_joining_and_starting_at_once_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        asked("--nats-port", "5000", "--nats-url", URL)


def test_children_join_the_bus_that_was_started_whatever_is_exported() -> None:
    environ = {"PENSTOCK_NATS_URL": URL}
    settings = asked("--nats-port", "5000", environ=environ)
    assert {child.nats_url for child in children(settings, environ).values()} == {"nats://127.0.0.1:4222"}


# ── one model ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("table", ["gateway", "decode", "up", "common"])
def test_what_is_said_of_the_model_anywhere_holds_for_all(table: str, tmp_path: Path) -> None:
    settings = asked(file=f'[{table}]\nserved_model_name = "mine"\n', folder=tmp_path)
    assert {child.served_name for child in children(settings).values()} == {"mine"}
    assert settings.config.served_name == "mine"


def test_two_opinions_of_the_model_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len must be one .* 100 in \[gateway\], 200 in \[decode\]"):
        asked(file="[gateway]\nmax_model_len = 100\n[decode]\nmax_model_len = 200\n", folder=tmp_path)


def test_the_gateways_own_table_says_where_the_api_is(tmp_path: Path) -> None:
    file = '[gateway]\nhttp_port = 9000\nhttp_host = "127.0.0.2"\n[up]\nhttp_port = 9001\n'
    assert asked(file=file, folder=tmp_path).config.http_port == 9000
    assert asked(file=file, folder=tmp_path).config.http_host == "127.0.0.2"
    assert asked(file=file, folder=tmp_path, environ={"PENSTOCK_HTTP_PORT": "9002"}).config.http_port == 9002
    assert asked("--http-port=9003", file=file, folder=tmp_path).config.http_port == 9003
    with pytest.raises(ConfigError, match="http_port -1"):
        asked(file="[gateway]\nhttp_port = -1\n", folder=tmp_path)


# ── mistakes, and secrets ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "environ", "file", "says"),
    [
        (["--kv-cache-bm", "1"], {}, "", "unknown flag --kv-cache-bm; did you mean --kv-cache-mb?"),
        (["--worker-id", "x"], {}, "", "unknown flag --worker-id"),
        (["--port", "8000"], {}, "", "unknown flag --port: here it is --http-port"),
        (["--max-num-seqs=64"], {}, "", "unknown flag --max-num-seqs: here it is --max-running"),
        (["--enable-prefix-caching"], {}, "", "that is always so here: leave it out"),
        (["--tensor-parallel-size", "2"], {}, "", "a model is on one GPU"),
        (["--max-running", "-3"], {}, "", "--max-running: expected int >= 0"),
        (["--log-dir", "--decode", "2"], {}, "", "--log-dir needs a value"),
        ([], {"PENSTOCK_KV_CACHE_BM": "1"}, "", "unknown variable PENSTOCK_KV_CACHE_BM; did you mean PENSTOCK_KV_CACHE_MB?"),
        ([], {"PENSTOCK_MAX_RUNNING": "many"}, "", "PENSTOCK_MAX_RUNNING: expected int"),
        ([], {}, "[decode]\nmax_runing = 1\n", "max_runing; did you mean max_running?"),
        ([], {}, "[up]\nmax_runing = 1\n", "max_runing; did you mean max_running?"),
        ([], {}, "[kvstore]\nmax_running = 1\n", "it belongs in [prefill], [decode], [draft] or [up]"),
        ([], {}, "[common]\ncapacity_mb = 1\n", "it belongs in [kvstore] or [up]"),
        ([], {}, "[decode]\ngateway = 2\n", "it belongs in [up]"),
        ([], {}, '[kvstore]\ncapacity_mb = "big"\n', "capacity_mb in [kvstore]"),
    ],
)
def test_a_mistake_meant_for_any_process_is_found_before_one_is_started(
    flags: list[str], environ: dict[str, str], file: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(*flags, environ=environ, file=file, folder=tmp_path)
    assert says in str(caught.value)


def test_flags_of_other_servers_have_names_that_exist_here_and_are_none_themselves() -> None:
    sections = (up_fields(), *(service_fields(role) for role in ROLES))
    known = {field.flag for fields in sections for field in fields.values()}
    assert set(flags_elsewhere.NAMES.values()) <= known
    assert not known & {*flags_elsewhere.NAMES, *flags_elsewhere.ALWAYS, *flags_elsewhere.REASONS}
    assert not flags_elsewhere.advice("--port", ["--model"]), "a command without that flag"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--min-match=9"], {}),
        ([], {"PENSTOCK_MIN_MATCH": "9"}),
        (["--max-match=3"], {"PENSTOCK_MIN_MATCH": "4"}),
        (["--min-match=4"], {"PENSTOCK_MAX_MATCH": "3"}),
    ],
)
def test_n_grams_that_could_never_match_are_refused(flags: list[str], environ: dict[str, str]) -> None:
    """By `penstock up` and by a draft worker that is started by hand."""
    for read in (
        lambda: asked(*flags, environ=environ),
        lambda: configuration.load(config_type("draft"), section="draft", argv=flags, environ=environ),
    ):
        with pytest.raises(ConfigError, match=r"^--min-match \d is above --max-match \d, .*$"):
            read()
    configuration.load(config_type("draft"), section="draft", argv=["--min-match=8"], environ={})


def test_variables_that_others_read_are_no_mistake() -> None:
    environ = dict.fromkeys(("PENSTOCK_HOME", "PENSTOCK_IMAGE", "PENSTOCK_URL", "PENSTOCK_DEMO", "PENSTOCK_HISTORIES"), "x")
    environ |= {"PENSTOCK_CAPACITY_MB": "64", "PENSTOCK_PREFILL": "2", "PENSTOCK_PROPOSAL_TOKENS": "8"}
    environ |= {"PENSTOCK_API_SERVICE_HOST": "10.0.0.1", "PENSTOCK_API_PORT": "tcp://10.0.0.1:80", "PENSTOCK_SERVICE_PORT": "1"}
    environ |= {"PENSTOCK_API_PORT_80_TCP_ADDR": "10.0.0.1", "PENSTOCKS": "3"}
    asked(environ=environ)
    for role in ROLES:
        configuration.load(config_type(role), section=role, argv=[], environ=environ)
    with pytest.raises(ConfigError, match="unknown variable PENSTOCK_API_PORT"):
        asked(environ={"PENSTOCK_API_PORT": "80"})


@pytest.mark.parametrize("way", ["flags", "variables"])
def test_secrets_are_handed_on_by_environment(way: str) -> None:
    secret, url = "s3cret-key", "nats://user:pa55word@127.0.0.1:4222"
    environ = {"PENSTOCK_API_KEY": secret, "PENSTOCK_NATS_URL": url} if way == "variables" else {}
    flags = [f"--api-key={secret}", f"--nats-url={url}"] if way == "flags" else []
    settings = asked(*FIVE, *flags, environ=environ)
    for spec in started(settings).values():
        assert secret not in " ".join(spec.arguments) and "pa55word" not in " ".join(spec.arguments)
        assert spec.environment["PENSTOCK_NATS_URL"] == url
    found: dict[str, Any] = children(settings, environ)
    assert found["gateway"].api_key == secret
    assert {child.nats_url for child in found.values()} == {url}


def test_a_message_about_a_secret_does_not_hold_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(file="[gateway]\napi_key = 123456\n", folder=tmp_path)
    assert "api_key" in str(caught.value) and "123456" not in str(caught.value)


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_names_every_flag_once_and_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = up_settings.help_text()
    for field in up_settings.offered().values():
        assert sum(line.split()[:1] == [field.flag] for line in shown.splitlines()) == 1, field.flag
    assert max(map(len, shown.splitlines())) <= 80
    headings = [shown.index(f"\n{heading}:\n") for heading in ("What is started", "The model", "Gateways", "Every process")]
    assert headings == sorted(headings)


def test_every_flag_that_is_offered_says_what_it_is() -> None:
    assert "models" not in up_settings.offered(), "what a gateway derives from its file is no setting"
    assert all(field.description for field in up_settings.offered().values())
    with pytest.raises(ConfigError, match="unknown flag --models"):
        asked("--models", "[]")
