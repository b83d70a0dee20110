"""compose.models.yaml over compose.yaml: what each container's variables and file come to, by the code that services run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.runtime import model_tables
from common.runtime.sections import config_type, unknown_variables

ROOT = Path(__file__).parents[2]
MOUNTED = "/etc/penstock/models.toml"


def interpolated(text: str) -> str:
    """The defaults of the variables in a compose file."""
    return re.sub(r"\$\{\w+(?::?-([^}]*))?\}", lambda found: found[1] or "", text)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of both files, put together as compose does: maps are merged, lists are joined."""
    yaml = pytest.importorskip("yaml")
    base, over = (
        yaml.safe_load(interpolated((ROOT / name).read_text()))["services"] for name in ("compose.yaml", "compose.models.yaml")
    )
    merged = dict(base)
    for name, service in over.items():
        known = base.get(name, {})
        merged[name] = {
            **known,
            **service,
            "environment": {**known.get("environment", {}), **service["environment"]},
            "volumes": [*known.get("volumes", ()), *service["volumes"]],
        }
    return merged


def config_of(service: dict[str, Any]) -> Any:
    """The settings that the container's process comes to. The file is read where it lies here."""
    (mount,) = [volume for volume in service["volumes"] if MOUNTED in volume]
    source, target, mode = mount.split(":")
    assert (target, mode) == (MOUNTED, "ro")
    environment = {**service["environment"], "PENSTOCK_CONFIG": str(ROOT / source)}
    assert service["environment"]["PENSTOCK_CONFIG"] == MOUNTED
    assert unknown_variables(environment, {}) == []
    role = service["command"][0].removeprefix("services.")
    return model_tables.load(config_type(role), section=role, argv=[], environ=environment)


def test_the_gateway_serves_both_models(services: dict[str, Any]) -> None:
    each = config_of(services["gateway"]).each
    assert [(config.model, config.served_name, config.aliases) for config in each] == [
        ("smollm2-135m-instruct", "smol", ("assistant",)),
        ("dummy:tiny", "tiny", ()),
    ]
    assert [config.max_model_len for config in each] == [0, 256]


@pytest.mark.parametrize(
    ("service", "model"), [("prefill", "smol"), ("decode", "smol"), ("draft", "smol"), ("decode-second", "tiny")]
)
def test_each_worker_serves_its_own(services: dict[str, Any], service: str, model: str) -> None:
    config = config_of(services[service])
    assert config.served_name == model
    assert config.max_model_len == (256 if model == "tiny" else 0)


def test_a_further_models_worker_is_a_decode_worker_in_all_but_its_model(services: dict[str, Any]) -> None:
    first, second = services["decode"], services["decode-second"]
    of_a_model = {"PENSTOCK_SERVED_MODEL_NAME", "PENSTOCK_CAPACITY_MB"}
    same = first["environment"].keys() - of_a_model
    assert {name: second["environment"][name] for name in same} == {name: first["environment"][name] for name in same}
    assert set(first["volumes"]) == set(second["volumes"])
    for key in ("command", "healthcheck", "stop_grace_period", "restart", "depends_on", "image"):
        assert first[key] == second[key], key


def test_a_store_is_all_models_and_starts_without_being_told_one(services: dict[str, Any]) -> None:
    assert config_of(services["kvstore"]).capacity_mb == 1024


def test_the_gateway_alone_is_told_the_api_key(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "PENSTOCK_API_KEY" in service.get("environment", {})] == ["gateway"]
    assert config_of(services["gateway"]).key == ""


def test_variables_of_the_compose_files_are_no_mistake_of_a_shell_that_exports_them() -> None:
    read = {name for file in ROOT.glob("compose*.yaml") for name in re.findall(r"\$\{(PENSTOCK_\w+)", file.read_text())}
    assert {"PENSTOCK_IMAGE", "PENSTOCK_KVSTORES"} <= read
    assert unknown_variables(dict.fromkeys(read, "x"), {}) == []
