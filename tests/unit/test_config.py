"""Settings: who wins, what is refused, and that the message says what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.runtime import config
from common.runtime.sections import config_type
from common.runtime.settings import ServiceConfig


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    dtype: Annotated[Literal["auto", "float32"], Meta(description="precision of weights")] = "auto"
    kv_cache_mb: int = 1024


class DecodeConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0: from kv_cache_mb")] = 0
    speculate: bool = True
    names: list[str] = []
    threshold: float | None = None
    folder: Path = Path()
    engine: Engine = Engine()


class Needy(msgspec.Struct, frozen=True, kw_only=True):
    target: str


def load(*argv: str, environ: dict[str, str] | None = None, path: Path | None = None) -> DecodeConfig:
    return config.load(DecodeConfig, section="decode", argv=argv, environ=environ or {}, path=path)


def fails(*argv: str, environ: dict[str, str] | None = None, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, environ=environ, path=path)
    return str(caught.value)


def test_defaults_need_nothing():
    assert load() == DecodeConfig()


def test_flags_win_over_environment_over_the_section_over_common_over_defaults(tmp_path: Path):
    path = tmp_path / "penstock.toml"
    path.write_text("[common]\nlease_s = 1\nheartbeat_s = 0.1\n[decode]\nlease_s = 2.0\nnum_blocks = 10\n[draft]\nany = 1\n")
    assert load(path=path).heartbeat_s == 0.1
    assert load(path=path).lease_s == 2.0
    assert load(path=path, environ={"PENSTOCK_LEASE_S": "3"}).lease_s == 3.0
    assert load("--lease-s", "4", path=path, environ={"PENSTOCK_LEASE_S": "3"}).lease_s == 4.0
    assert load("--config", str(path)).num_blocks == 10
    assert load(environ={"PENSTOCK_CONFIG": str(path)}).num_blocks == 10


def test_text_that_is_no_utf8_is_refused():
    """The wire is UTF-8: a worker that was called so could say nothing."""
    name = os.fsdecode(b"caf\xe9")
    assert fails("--model", name).startswith(r"--model: 'caf\udce9' is not UTF-8: choose another name")
    assert "is not UTF-8" in fails("--names", f"a,{name}") and "is not UTF-8" in fails("--folder", name)
    assert name not in fails(environ={"PENSTOCK_NATS_URL": name}) and load("--model", "café").model == "café"


def test_every_way_to_write_a_flag():
    given = load("--num-blocks=7", "--no-speculate", "--names", "a, b,c", "--threshold=0.5", "--folder", "/tmp")
    assert given == DecodeConfig(num_blocks=7, speculate=False, names=["a", "b", "c"], threshold=0.5, folder=Path("/tmp"))
    assert load("--speculate=false").speculate is False and load("--speculate").speculate is True
    assert load("--num_blocks", "7").num_blocks == 7
    assert load("--http-port=-1").http_port == -1 and load("--http-port", "-1").http_port == -1
    assert load(environ={"PENSTOCK_SPECULATE": "0"}).speculate is False


def test_fields_of_a_nested_struct_are_settings_like_others(tmp_path: Path):
    path = tmp_path / "penstock.toml"
    path.write_text("[decode]\nkv_cache_mb = 64\n")
    assert load("--dtype", "float32", path=path).engine == Engine(dtype="float32", kv_cache_mb=64)


def test_settings_can_be_passed_on_as_flags():
    given = load("--num-blocks=7", "--no-speculate", "--names=a,b", "--dtype=float32", "--log-level=debug")
    argv = config.to_argv(given)
    assert load(*argv) == given and "--num-blocks=7" in argv and len(argv) == 5


def test_what_is_unknown_names_the_nearest_known(tmp_path: Path):
    path = tmp_path / "penstock.toml"
    assert fails("--num-block", "1") == "unknown flag --num-block; did you mean --num-blocks?"
    assert fails("--completely-different") == "unknown flag --completely-different"
    path.write_text("[decode]\nnum_bloks = 1\n")
    assert fails(path=path).endswith("num_bloks; did you mean num_blocks?")
    path.write_text("[decod]\nnum_blocks = 1\n")
    assert fails(path=path).endswith("decod; did you mean decode?")
    path.write_text("num_blocks = 1\n")
    assert "num_blocks belongs in a table, [common] or [decode]" in fails(path=path)


def test_what_is_wrong_names_where_it_was_given(tmp_path: Path):
    path = tmp_path / "penstock.toml"
    path.write_text('[decode]\nnum_blocks = "many"\n')
    assert fails("--num-blocks", "many").startswith("--num-blocks: expected int")
    assert fails("--num-blocks=-1").startswith("--num-blocks: expected int >= 0")
    assert fails(environ={"PENSTOCK_LEASE_S": "-3"}).startswith("PENSTOCK_LEASE_S: expected float > 0")
    assert fails(path=path).startswith(f"num_blocks in [decode] of {path}: expected int")
    assert fails("--speculate=maybe") == "--speculate: expected true or false, got 'maybe'"
    assert fails("--dtype=int4").startswith("--dtype: expected one of auto, float32")
    assert fails("--worker-id=a.b").startswith("--worker-id: expected str matching regex")
    assert "(unique name; empty: drawn at start), got 'a.b'" in fails("--worker-id=a.b")
    assert fails("--num-blocks=many") == "--num-blocks: expected int, got 'many'"
    assert fails("--heartbeat-s=5").startswith("--heartbeat-s 5 is more than half of --dead-after-s 2")
    assert fails("--lease-s=nan").startswith("--lease-s")
    assert fails("--num-blocks") == "--num-blocks needs a value"
    assert fails("--no-speculate=1") == "--no-speculate takes no value"
    assert fails("stray").startswith("unexpected argument 'stray'")
    assert fails("--speculate", "false").endswith("switches as --name or --no-name")
    assert fails("--config", str(tmp_path / "missing.toml")).startswith("can't read ")
    path.write_text("[decode\n")
    assert "is not valid TOML" in fails(path=path)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path):
    path = tmp_path / "penstock.toml"
    path.write_text("[decode]\r\nnum_blocks = 7\r\n", encoding="utf-8-sig")
    assert load(path=path).num_blocks == 7


@pytest.mark.parametrize("value", ["1e22", "-1e22", "inf", "nan"])
def test_a_number_that_fits_no_message_is_refused(value: str):
    """A gateway with such a deadline ended at its first request, and a kvstore with such a capacity as it started."""
    assert fails("--threshold", value).startswith("--threshold: expected a number of at most 9007199254740992")


def test_an_integer_that_fits_no_message_is_refused():
    assert fails("--num-blocks", str(10**22)).startswith("--num-blocks: expected a number of at most 9007199254740992")
    assert load("--num-blocks", str(2**53)).num_blocks == 2**53


def test_a_required_setting_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="--target is required"):
        config.load(Needy, section="up", argv=[], environ={})
    assert config.load(Needy, section="up", argv=["--target=x"], environ={}) == Needy(target="x")


def test_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        load("--num-blocks=7", "--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--num-blocks" in shown and "KV blocks; 0: from kv_cache_mb (default: 0)" in shown
    assert "precision of weights; one of auto, float32 (default: auto)" in " ".join(shown.split())
    assert "--dtype" in shown and "--config FILE" in shown and "default: true" in shown


@pytest.mark.parametrize(
    ("role", "flag"),
    [
        ("kvstore", "--capacity-mb"),
        ("decode", "--kv-cache-mb"),
        ("gateway", "--batch-storage-mb"),
        ("gateway", "--slow-reader-timeout-s"),
    ],
)
def test_a_size_that_no_system_call_takes_is_refused(role: Role, flag: str):
    with pytest.raises(ConfigError, match=f"{flag}: expected (int|float) <= "):
        config.load(config_type(role), section=role, argv=[flag, str(2**53)], environ={})
