"""The `[[models]]` of a settings file: what each model's processes come to, which of the models is meant, and mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.cli import up_settings
from common.cli.fleet import ProcessSpec, processes, settled
from common.cli.up_settings import UpSettings
from common.protocol.errors import ConfigError
from common.runtime import model_tables
from common.runtime.sections import config_type, model_fields
from common.runtime.settings import ServiceConfig
from services.gateway.config import GatewayConfig
from services.gateway.model_core import Served, names_of_workers

FILE = """
[common]
lease_s = 7

[decode]
max_running = 3
num_blocks = 100

[[models]]
model = "Org/Large-8B"
served_model_name = ["large", "assistant", "gpt"]
quantization = "fp8"
decode = 2
max_running = 9

[[models]]
model = "dummy:tiny"
engine = "simulated"
prefill = 1
draft = 1
max_model_len = 128
generation_config = "none"
proposal_tokens = 5
gpu_memory_utilization = 0.25
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def service(role: str, path: Path, *argv: str, **environ: str) -> Any:
    return model_tables.load(config_type(role), section=role, argv=[f"--config={path}", *argv], environ=environ)


def asked(path: Path, *argv: str, **environ: str) -> UpSettings:
    found = up_settings.read(["--config", str(path), *argv], environ)
    assert found is not None
    return found


def started(settings: UpSettings, *, gpus: tuple[int, ...] = ()) -> list[ProcessSpec]:
    """What `penstock up` would start on four cores."""
    fleets = [msgspec.structs.replace(each, config=settled(each.config, 0, 4), gpus=gpus) for each in settings.fleets]
    config = msgspec.structs.replace(settled(settings.config, 0, 4), nats_url="nats://127.0.0.1:4222")
    return processes(
        config, cores=4, passed=settings.passed, services=settings.services, fleets=fleets, config_file=settings.config_file
    )


def children(specs: list[ProcessSpec], environ: Mapping[str, str] | None = None) -> dict[str, ServiceConfig]:
    """The settings that each process comes to, by the code that a service itself runs."""
    return {
        spec.name: model_tables.load(
            config_type(spec.role),
            section=spec.role,
            argv=spec.arguments,
            environ={**(environ or {}), **spec.environment},
        )
        for spec in specs
    }


# ── a service ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gateway_has_the_settings_of_each_model(tmp_path: Path) -> None:
    config: GatewayConfig = service("gateway", written(tmp_path))
    large, tiny = config.each
    assert (large.model, large.served_name, large.aliases) == ("Org/Large-8B", "large", ("assistant", "gpt"))
    assert (tiny.model, tiny.served_name, tiny.aliases) == ("dummy:tiny", "dummy:tiny", ())
    assert (large.generation_config, large.max_model_len) == ("auto", 0)
    assert (tiny.generation_config, tiny.max_model_len) == ("none", 128)
    assert {each.lease_s for each in (config, large, tiny)} == {7.0}
    assert config.served_name == "large", "the first model's settings are the gateway's"


def test_without_the_tables_everything_is_as_it_was(tmp_path: Path) -> None:
    config: GatewayConfig = service("gateway", written(tmp_path, "[common]\nlease_s = 3\n"), "--model", "x", "--aliases", "a,b")
    assert config.each == (config,)
    assert (config.model, config.aliases, config.models) == ("x", ("a", "b"), ())


@pytest.mark.parametrize("chosen", [("--served-model-name", "gpt"), ("--model", "Org/Large-8B"), ("--model", "large")])
def test_a_process_of_one_model_is_told_which(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    for role in ("decode", "prefill", "draft", "gateway", "kvstore"):
        config = service(role, written(tmp_path), *chosen)
        assert (config.model, config.served_name) == ("Org/Large-8B", "large")
    assert service("gateway", written(tmp_path), *chosen).each[0].aliases == ("assistant", "gpt")


def test_a_variable_chooses_too_and_an_empty_one_does_not(tmp_path: Path) -> None:
    assert service("decode", written(tmp_path), PENSTOCK_SERVED_MODEL_NAME="large").quantization == "fp8"
    assert len(service("gateway", written(tmp_path), PENSTOCK_MODEL="").each) == 2
    assert len(service("gateway", written(tmp_path), PENSTOCK_MODEL="dummy:tiny").each) == 1


def test_a_model_may_lie_elsewhere_on_this_machine(tmp_path: Path) -> None:
    config = service("decode", written(tmp_path), "--served-model-name=large", "--model=/models/large-8b")
    assert (config.model, config.served_name, config.quantization) == ("/models/large-8b", "large", "fp8")


def test_a_models_table_beats_other_tables_and_flags_and_variables_beat_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert service("decode", path, "--served-model-name=large").max_running == 9
    assert service("decode", path, "--served-model-name=large").num_blocks == 100
    assert service("decode", path, "--served-model-name=dummy:tiny").max_running == 3
    assert service("decode", path, "--served-model-name=large", PENSTOCK_MAX_RUNNING="11").max_running == 11
    assert service("decode", path, "--served-model-name=large", "--max-running=12", PENSTOCK_MAX_RUNNING="11").max_running == 12
    assert [each.max_model_len for each in service("gateway", path, "--max-model-len=50").each] == [50, 50]


def test_a_worker_of_several_models_has_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has several models: choose one with --served-model-name: large, dummy:tiny"):
        service("decode", written(tmp_path))
    only = written(tmp_path, '[[models]]\nmodel = "dummy:tiny"\n')
    assert service("decode", only).model == "dummy:tiny"
    assert service("kvstore", written(tmp_path)).served_name == "large", "a store is all models'"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[models]]\nmodle = 'x'\n", "unknown key in [[models]] number 1 of {path}: modle; did you mean model?"),
        ("[[models]]\nmodel = 'x'\nquantisation = 'fp8'\n", "did you mean quantization?"),
        ("[[models]]\nmodel = 'x'\nquantization = 'fp9'\n", "quantization in [[models]] number 1 of {path}: expected one of"),
        ("[[models]]\nmodel = 'x'\ndecode = -1\n", "decode in [[models]] number 1"),
        ("[[models]]\nmodel = 'x'\nlease_s = 3\n", "unknown key in [[models]] number 1 of {path}: lease_s"),
        ("[[models]]\nmodel = 'x'\nkvstore = 3\n", "unknown key in [[models]] number 1 of {path}: kvstore"),
        ("[[models]]\nserved_model_name = 'x'\n", "[[models]] number 1 of {path} lacks `model`"),
        (
            "[[models]]\nmodel = 'x'\nserved_model_name = [1]\n",
            "served_model_name in [[models]] number 1 of {path}: expected str",
        ),
        ("[models]\nmodel = 'x'\n", "models are tables, each under a line [[models]]"),
        ("[[model]]\nmodel = 'x'\n", "model belongs in a table"),
        ("[[models]]\nmodel = 'a/x'\n[[models]]\nmodel = 'a/x'\n", "two models are called 'a/x'"),
        (
            "[[models]]\nmodel = 'a/x'\n[[models]]\nmodel = 'y'\nserved_model_name = ['y', 'A-X']\n",
            "'a/x' and 'A-X' would share the NATS subject penstock.v1.chat.a-x",
        ),
        ("[common]\nmodel = 'x'\n[[models]]\nmodel = 'x'\n", "model stands beside [[models]]"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    for read in (lambda: service("gateway", path), lambda: asked(path)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert says.format(path=path) in str(caught.value)


def test_an_empty_name_is_the_models_own_and_an_alias_may_stand_by_itself(tmp_path: Path) -> None:
    text = "[[models]]\nmodel = 'a/x'\nserved_model_name = ['', 'y']\n[[models]]\nmodel = 'z'\naliases = ['w']\n"
    first, second = service("gateway", written(tmp_path, text)).each
    assert (first.served_name, first.aliases) == ("a/x", ("y",))
    assert (second.served_name, second.aliases) == ("z", ("w",))
    with pytest.raises(ConfigError, match="aliases"):
        service("gateway", written(tmp_path, "[[models]]\nmodel = 'z'\naliases = ['']\n"))


def test_an_unknown_choice_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown model in .*: larg; did you mean large"):
        service("gateway", written(tmp_path), "--served-model-name", "larg")
    with pytest.raises(ConfigError, match="did you mean large"):
        asked(written(tmp_path), "--model", "larg")


def test_one_model_under_two_names_is_chosen_by_name(tmp_path: Path) -> None:
    twice = "[[models]]\nmodel = 'x'\nserved_model_name = 'a'\n[[models]]\nmodel = 'x'\nserved_model_name = 'b'\n"
    path = written(tmp_path, twice)
    assert [each.served_name for each in service("gateway", path).each] == ["a", "b"]
    with pytest.raises(ConfigError, match="serves x as a, b: choose with --served-model-name"):
        service("decode", path, "--model", "x")
    assert service("decode", path, "--model", "x", "--served-model-name", "b").served_name == "b"


def test_a_table_says_what_workers_have_and_nothing_that_every_process_has() -> None:
    known = set(model_fields())
    assert known >= {"model", "served_model_name", "max_model_len", "aliases", "generation_config", "device", "engine"}
    assert known >= {"prefill", "decode", "draft", "speculation_tokens", "min_match", "gpu_memory_utilization"}
    assert not known & {"lease_s", "nats_url", "http_port", "api_key", "worker_id", "shm_dir", "kvstore", "capacity_mb"}


# ── penstock up ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_up_starts_each_models_workers_and_one_of_what_they_share(tmp_path: Path) -> None:
    specs = started(asked(written(tmp_path)))
    assert [spec.name for spec in specs] == [
        "gateway-0",
        "decode-large-0",
        "decode-large-1",
        "prefill-dummy-tiny-0",
        "decode-dummy-tiny-0",
        "draft-dummy-tiny-0",
        "kvstore-0",
    ]
    found: dict[str, Any] = children(specs)
    assert [each.served_name for each in found["gateway-0"].each] == ["large", "dummy:tiny"]
    large, tiny = found["decode-large-1"], found["decode-dummy-tiny-0"]
    assert (large.served_name, large.quantization, large.engine, large.max_running) == ("large", "fp8", "torch", 9)
    assert (tiny.served_name, tiny.quantization, tiny.engine, tiny.max_running) == ("dummy:tiny", "auto", "simulated", 3)
    assert found["draft-dummy-tiny-0"].proposal_tokens == 5
    assert {config.lease_s for config in found.values()} == {7.0}


def test_flags_are_for_all_models_and_one_may_be_chosen(tmp_path: Path) -> None:
    found: dict[str, Any] = children(started(asked(written(tmp_path), "--decode=3", "--max-running=5")))
    assert {name for name in found if "decode" in name} == {
        f"decode-{tag}-{index}" for tag in ("large", "dummy-tiny") for index in range(3)
    }
    assert {config.max_running for name, config in found.items() if "decode" in name} == {5}
    for chosen in ("--served-model-name=gpt", "--model=Org/Large-8B"):
        found = children(started(asked(written(tmp_path), chosen)))
        assert set(found) == {"gateway-0", "decode-0", "decode-1", "kvstore-0"}
        assert {config.served_name for config in found.values()} == {"large"}
        assert found["gateway-0"].each[0].aliases == ("assistant", "gpt")


def test_all_models_engines_share_the_cores_and_the_gpus(tmp_path: Path) -> None:
    specs = [spec for spec in started(asked(written(tmp_path), "--dtype=float32")) if spec.threads]
    assert {spec.name: spec.threads for spec in specs} == dict.fromkeys([spec.name for spec in specs], 1), (
        "four engines, four cores"
    )
    found: dict[str, Any] = children(started(asked(written(tmp_path)), gpus=(0, 1)))
    placed = {name: (config.device, config.gpu_memory_utilization) for name, config in found.items() if "code" in name}
    assert placed == {
        "decode-large-0": ("cuda:0", 0.45),
        "decode-large-1": ("cuda:1", 0.45),
        "decode-dummy-tiny-0": ("cuda:1", 0.25),
    }


def test_a_context_that_a_pool_holds_is_its_models(tmp_path: Path) -> None:
    settings = asked(written(tmp_path)).with_context("large", 1000)
    found: dict[str, Any] = children(started(settings))
    assert found["decode-large-0"].max_model_len == 1000
    assert found["decode-dummy-tiny-0"].max_model_len == 128
    assert [each.max_model_len for each in found["gateway-0"].each] == [0, 128]


def test_names_of_workers_with_long_models_names_are_names() -> None:
    from common.cli.fleet import _tags

    tags = _tags(["Org/" + "a" * 60, "Org/" + "a" * 61, "größe"])
    assert len(set(tags)) == 3 and all(len(tag) < 60 and tag.endswith("-") for tag in tags)


# ── whose workers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def names(*models: tuple[str, str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    return names_of_workers(
        Served(GatewayConfig(model=model, served_model_name=name, aliases=aliases)) for model, name, aliases in models
    )


def test_a_worker_without_a_name_joins_the_only_model_that_it_could_mean() -> None:
    assert names(("x.gguf", "a", ("b",)), ("y.gguf", "", ())) == [("a", "b", "x"), ("y",)]
    assert names(("x.gguf", "a", ()), ("x.gguf", "b", ())) == [("a",), ("b",)]
    assert names(("x.gguf", "a", ()), ("y.gguf", "x", ())) == [("a",), ("x", "y")]
