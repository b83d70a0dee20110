"""The models of a settings file: a `[[models]]` table for each, where one gateway or `penstock up` serves several.

    [[models]]
    model = "Qwen/Qwen3-8B"
    served_model_name = ["qwen3", "assistant"]    its name, then its aliases
    quantization = "fp8"                          any setting of engines and draft workers, some of gateways
    decode = 2                                    how many workers of it `penstock up` starts

What a table says is weaker than flags and variables, and stronger than [common] and a service's own table. `model` and
`served_model_name` as a flag or variable choose one of the models. A process that serves one model has to be told which, unless
the file has only one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.models.naming import model_name
from common.protocol import subjects
from common.protocol.errors import ConfigError
from common.runtime import config as configuration
from common.runtime.config import MODEL_TABLES, Given, Layers
from common.runtime.sections import model_fields
from common.runtime.settings import ServiceConfig

C = TypeVar("C", bound=ServiceConfig)

CHOICE = ("model", "served_model_name")
"""The settings that say which model is meant."""


class ModelTable(msgspec.Struct, frozen=True):
    """One `[[models]]` table. `names`: its name, then its aliases. `settings`: what else it says, by setting."""

    model: str
    names: tuple[str, ...]
    settings: dict[str, Given]

    @property
    def name(self) -> str:
        return self.names[0]


def load(kind: type[C], *, section: str, argv: Sequence[str], environ: Mapping[str, str], path: Path | None = None) -> C:
    """The settings of a service, as `config.load` gives them, for the models of its file if it has any.

    :raises ConfigError: as `config.load`; for a mistake in the tables, or several models where one has to be chosen.
    """
    layers = configuration.read_layers(kind, section=section, argv=argv, environ=environ, path=path)
    tables = read(layers.path)
    if not tables:
        return layers.build(kind)
    check_no_other(layers.weak)
    chosen = choose(tables, layers.strong, layers.path)
    if len(chosen) > 1 and not kind.of_all_models:
        listed = ", ".join(table.name for table in chosen)
        raise ConfigError(
            f"{layers.path} has several models: choose one with --served-model-name: {listed}", param="served_model_name"
        )
    if len(chosen) > 1 and "aliases" in layers.strong:
        raise ConfigError("aliases are one model's: say them in its [[models]] table, in served_model_name", param="aliases")
    each = [_build(kind, layers, table) for table in chosen]
    if len(each) == 1 or "models" not in kind.__struct_fields__:
        return each[0]
    return msgspec.structs.replace(each[0], models=tuple(each))


def read(path: Path | None) -> list[ModelTable]:
    """The `[[models]]` tables of a file that is valid TOML, if there are any.

    :raises ConfigError: an unknown key, a wrong value, a model without `model`, or a name of two models.
    """
    if path is None:
        return []
    listed = tomllib.loads(path.read_text(encoding="utf-8-sig")).get(MODEL_TABLES, [])
    tables = [_table(content, number, path) for number, content in enumerate(listed, 1)]
    _check_names(tables, path)
    return tables


def check_no_other(given: Iterable[str]) -> None:
    """:raises ConfigError: another table of the file names a model, too."""
    for name in set(CHOICE).intersection(given):
        raise ConfigError(f"{name} stands beside [[models]]: say it in one of these tables", param=name)


def choose(tables: Sequence[ModelTable], given: Mapping[str, Given], path: Path | None) -> list[ModelTable]:
    """The models that flags and variables leave: all, or one. An empty variable says nothing.

    :raises ConfigError: there is no such model, or there are several.
    """
    model, name = ("" if (found := given.get(setting)) is None else str(found.value) for setting in CHOICE)
    left = [table for table in tables if not name or name in table.names]
    if model and not name:
        left = [table for table in tables if model in (table.model, *table.names) or model_name(model) in table.names]
        if len(left) > 1:
            listed = ", ".join(table.name for table in left)
            raise ConfigError(f"{path} serves {model} as {listed}: choose with --served-model-name", param="model")
    if not left:
        configuration.unknown(f"model in {path}:", name or model, [known for table in tables for known in table.names])
    return left


def given_by(table: ModelTable, strong: Mapping[str, Given]) -> dict[str, Given]:
    """What holds for the model: what its table says, and flags and variables over that."""
    rest = {name: given for name, given in strong.items() if name not in CHOICE}
    model = Given(table.model, "[[models]]", False)
    if (typed := strong.get("model")) and typed.value and typed.value not in table.names:
        model = typed  # the same model, at another place on this machine
    return {**table.settings, **rest, "model": model, "served_model_name": Given(table.name, "[[models]]", False)}


def _build(kind: type[C], layers: Layers, table: ModelTable) -> C:
    given = {name: value for name, value in given_by(table, layers.strong).items() if name in layers.fields}
    if "aliases" in layers.fields and "aliases" not in layers.strong:
        given["aliases"] = Given(list(table.names[1:]), "[[models]]", False)
    return configuration.build(kind, layers.fields, {**layers.weak, **given})


def _table(content: Any, number: int, path: Path) -> ModelTable:
    where = f"[[models]] number {number} of {path}"
    known = model_fields()
    given: dict[str, Given] = {}
    for key, value in content.items():
        if key not in known:
            configuration.unknown(f"key in {where}:", key, known)
        given[key] = Given(value, f"{key} in {where}", False)
    if "model" not in given:
        raise ConfigError(f"{where} lacks `model`: a name, a folder, a .gguf file or a Hugging Face id", param="model")
    names: list[Any] = []
    if "served_model_name" in given:
        said = given.pop("served_model_name")
        for name in said.value if isinstance(said.value, list) else [said.value]:
            names.append(configuration.convert(known["served_model_name"], Given(name, said.source, False)))
    values = {key: configuration.convert(known[key], value) for key, value in given.items()}
    first, *aliases = names or [""]
    names = [first or model_name(values["model"]), *filter(None, aliases), *values.get("aliases", ())]
    settings = {key: value for key, value in given.items() if key not in ("model", "aliases")}
    return ModelTable(values["model"], tuple(dict.fromkeys(names)), settings)


def _check_names(tables: Sequence[ModelTable], path: Path) -> None:
    """:raises ConfigError: two models share a name, or a subject."""
    owners: dict[str, tuple[ModelTable, str]] = {}
    for table in tables:
        for name in table.names:
            owner, known = owners.setdefault(subjects.slug(name), (table, name))
            if owner is table:
                continue
            if known == name:
                raise ConfigError(f"{path}: two models are called {name!r}: name them with served_model_name", param="models")
            raise ConfigError(
                f"{path}: {known!r} and {name!r} would share the NATS subject {subjects.chat(subjects.slug(name))}: "
                "give one of them another served_model_name",
                param="models",
            )
