"""Settings from flags, environment, file and defaults, in this order, as one frozen Struct.

    config = load(DecodeConfig, section="decode", argv=sys.argv[1:], environ=os.environ)

    --num-blocks 512, --num-blocks=512      a flag per field; a bool is `--flag` or `--no-flag`; a list is `a,b,c`, or a
                                            flag for each
    PENSTOCK_NUM_BLOCKS=512                 an environment variable per field
    --config FILE, PENSTOCK_CONFIG=FILE     TOML with the tables [common] (what every service has) and [<section>];
                                            [[models]] are read by `model_tables`

What is unknown is an error that names the nearest known thing. All services share one environment and one file, so a variable
or a table of another section is none; see `sections`.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from common.protocol.errors import ConfigError
from common.runtime import flags_elsewhere, sections
from common.runtime.config_help import help_text
from common.runtime.fields import ENV_PREFIX, Field, as_text, bare, derived, fields_of

T = TypeVar("T", bound=msgspec.Struct)
Fields = Mapping[str, Field]
Tables = Mapping[str, Mapping[str, Any]]

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
MODEL_TABLES = "models"
"""`[[models]]`: what is served, where it is more than one model."""
MAX_NUMBER = 2**53
"""The largest number of any setting, with either sign: more milliseconds, or blocks, fit no message."""


class Given(msgspec.Struct, frozen=True):
    """A value and where it comes from, for error messages. `is_text`: from a flag or the environment."""

    value: Any
    source: str
    is_text: bool


class Flags(msgspec.Struct, frozen=True):
    """A command line: the settings on it, the file that `--config` names, and whether `--help` was among it."""

    given: dict[str, Given]
    config: Path | None = None
    wants_help: bool = False


class Layers(msgspec.Struct, frozen=True):
    """What is given for the settings of one section: `weak` by the file `path`, `strong` by environment and flags."""

    fields: dict[str, Field]
    weak: dict[str, Given]
    strong: dict[str, Given]
    path: Path | None

    def build(self, kind: type[T]) -> T:
        """:raises ConfigError: for a value that does not fit its setting."""
        return build(kind, self.fields, {**self.weak, **self.strong})


def load(kind: type[T], *, section: str, argv: Sequence[str], environ: Mapping[str, str], path: Path | None = None) -> T:
    """`--help` prints the fields and ends the process.

    :raises ConfigError: names the key, where it was given, what is wrong, and the nearest known key if it is unknown.
    """
    return read_layers(kind, section=section, argv=argv, environ=environ, path=path).build(kind)


def read_layers(
    kind: type[msgspec.Struct], *, section: str, argv: Sequence[str], environ: Mapping[str, str], path: Path | None = None
) -> Layers:
    """What `load` builds the settings from.

    :raises ConfigError: for what is unknown, and for a file that can't be read.
    """
    fields = fields_of(kind)
    flags = parse_flags(argv, fields)
    if flags.wants_help:
        sys.stdout.write(help_text(fields, section=section))
        raise SystemExit(0)
    chosen = config_path(flags, environ) or path
    tables = {} if chosen is None else read_tables(chosen, section)
    weak = {**from_table(tables, "common", fields, chosen), **from_table(tables, section, fields, chosen)}
    strong = {**from_environment(environ, fields), **flags.given}
    check_variables(environ, fields)
    return Layers(fields, weak, strong, chosen)


def config_path(flags: Flags, environ: Mapping[str, str]) -> Path | None:
    """The file that is named by a flag or by the environment."""
    return flags.config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)


def check_variables(environ: Mapping[str, str], fields: Fields) -> None:
    """:raises ConfigError: for a variable with our prefix that nobody reads; it names the nearest that somebody does."""
    for name in sections.unknown_variables(environ, fields):
        unknown("variable", name, sections.all_variables())


def to_argv(config: msgspec.Struct) -> list[str]:
    """The flags with which `load` gives an equal `config`: how a supervisor passes settings on. Defaults are left out."""
    argv: list[str] = []
    for field in fields_of(type(config)).values():
        value: Any = config
        for step in field.path:
            value = getattr(value, step)
        if value != field.default:
            argv.append(f"{field.flag}={as_text(value)}")
    return argv


def unknown(what: str, name: str, known: Iterable[str]) -> NoReturn:
    """:raises ConfigError: always."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    raise ConfigError(f"unknown {what} {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""), param=name)


# ── where values come from ───────────────────────────────────────────────────────────────────────────────────────────────


def parse_flags(argv: Sequence[str], fields: Fields) -> Flags:
    """:raises ConfigError: for an unknown flag, or one without its value."""
    by_flag = {field.flag: field for field in fields.values()}
    negated = {"--no-" + flag[2:]: field for flag, field in by_flag.items() if field.is_bool}
    found: dict[str, Given] = {}
    path: Path | None = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return Flags({}, wants_help=True)
        if not word.startswith("--"):
            raise ConfigError(
                f"unexpected argument {word!r}: settings are given as --name VALUE, switches as --name or --no-name", param=word
            )
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in negated and flag not in by_flag:
            if has_value:
                raise ConfigError(f"{flag} takes no value", param=flag)
            found[negated[flag].name] = Given(False, flag, False)
            continue
        if flag not in by_flag and flag != "--config":
            if advice := flags_elsewhere.advice(flag, by_flag):
                raise ConfigError(f"unknown flag {flag}: {advice}", param=flag)
            unknown("flag", flag, [*by_flag, "--config", "--help"])
        if flag != "--config" and by_flag[flag].is_bool and not has_value:
            found[by_flag[flag].name] = Given(True, flag, False)
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value", param=flag)
            value = rest.pop(0)
        if flag == "--config":
            path = Path(value)
        else:
            field = by_flag[flag]
            before = found.get(field.name) if field.is_collection else None
            found[field.name] = Given(value if before is None else f"{before.value},{value}", flag, True)
    return Flags(found, path)


def from_environment(environ: Mapping[str, str], fields: Fields) -> dict[str, Given]:
    return {
        name: Given(environ[field.variable], field.variable, True)
        for name, field in fields.items()
        if field.variable in environ
    }


def read_tables(path: Path, section: str) -> Tables:
    """The tables of a file, but those of models (`model_tables`).

    :raises ConfigError: if it can't be read, is no TOML, or has a table that is nobody's.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="config") from error
    models = tables.pop(MODEL_TABLES, [])
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in models):
        raise ConfigError(f"{path}: models are tables, each under a line [[{MODEL_TABLES}]]", param=MODEL_TABLES)
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} belongs in a table, [common] or [{section}]", param=table)
        if table not in (*sections.SECTIONS, section):
            unknown(f"table in {path}:", table, (*sections.SECTIONS, section, MODEL_TABLES))
    return tables


def from_table(tables: Tables, table: str, fields: Fields, path: Path | None) -> dict[str, Given]:
    """:raises ConfigError: for a key that is not among `fields`."""
    found: dict[str, Given] = {}
    for name, value in tables.get(table, {}).items():
        if name not in fields:
            if others := sections.other_tables(name, table):
                raise ConfigError(f"{name} in [{table}] of {path}: it belongs in {others}", param=name)
            unknown(f"key in [{table}] of {path}:", name, fields)
        found[name] = Given(value, f"{name} in [{table}] of {path}", False)
    return found


# ── from values to a Struct ──────────────────────────────────────────────────────────────────────────────────────────────


def build(kind: type[T], fields: Fields, given: Mapping[str, Given]) -> T:
    """`kind` with what is given, else with its defaults. :raises ConfigError: for a value that does not fit its setting."""
    return _build(kind, (), fields, {name: convert(fields[name], value) for name, value in given.items()})


def convert(field: Field, given: Given) -> Any:
    """:raises ConfigError: if the value does not fit the setting; it names where the value was given."""
    value = given.value
    if isinstance(value, str) and not _is_utf8(value):
        got = "what is given" if field.secret else repr(value)
        advice = "choose another name, or set a UTF-8 locale (LC_ALL=C.UTF-8)"
        raise ConfigError(f"{given.source}: {got} is not UTF-8: {advice}", param=field.name)
    if given.is_text and field.is_collection:
        value = [item.strip() for item in value.split(",") if item.strip()]
    try:
        converted = msgspec.convert(value, field.type, strict=not given.is_text, dec_hook=_decode_path)
        if isinstance(converted, int | float) and not abs(converted) <= MAX_NUMBER:  # so for nan
            raise ValueError(f"expected a number of at most {MAX_NUMBER}")
        return converted
    except (msgspec.ValidationError, ValueError) as error:
        got = "" if field.secret else f", got {given.value!r}"
        raise ConfigError(f"{given.source}: {_sentence(error, field)}{got}", param=field.name) from error


def _is_utf8(text: str) -> bool:
    """Return whether text came as UTF-8. Python keeps other bytes of a command line as surrogates, which no message carries."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sentence(error: Exception, field: Field) -> str:
    kind = bare(field.type)
    if field.choices:
        return f"expected one of {', '.join(field.choices)}"
    if kind is bool:
        return "expected true or false"
    sentence = str(error).split(" - at `$")[0].replace("`", "").replace("Expected", "expected")
    if "matching regex" in sentence and field.description:
        return f"{sentence} ({field.description})"
    return sentence.partition(", got ")[0]  # what was given is said behind it


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise ValueError(f"can't make a {kind.__name__} of it")


def _build(kind: type[T], path: tuple[str, ...], fields: Fields, values: Mapping[str, Any]) -> T:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name in derived(kind):
            continue
        here = (*path, field.name)
        setting = fields.get(field.name)
        if setting is not None and setting.path == here:
            if field.name in values:
                arguments[field.name] = values[field.name]
            elif setting.default is msgspec.NODEFAULT:
                raise ConfigError(f"{setting.flag} is required", param=field.name)
            continue
        nested = bare(typing.get_type_hints(kind, include_extras=True)[field.name])
        arguments[field.name] = _build(nested, here, fields, values)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
