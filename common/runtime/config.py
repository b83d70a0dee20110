"""Settings from flags, environment, file and defaults, in this order, as one frozen Struct.

    config = load(DecodeConfig, section="decode", argv=sys.argv[1:], environ=os.environ)

    --num-blocks 512, --num-blocks=512      a flag per field; a bool is `--flag` or `--no-flag`; a list is `a,b,c`
    PENSTOCK_NUM_BLOCKS=512                 an environment variable per field
    --config FILE, PENSTOCK_CONFIG=FILE     TOML with the tables [common] (what every service has) and [<section>]

The fields of a nested Struct are reached by their own names, as if they were written into the outer one. What is unknown is
an error that names the nearest known thing.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from common.protocol.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

ENV_PREFIX = "PENSTOCK_"
SECTIONS = ("common", "gateway", "prefill", "decode", "draft", "kvstore", "up")


class _Field(msgspec.Struct, frozen=True):
    """One setting. `path` leads through nested Structs to it."""

    path: tuple[str, ...]
    type: Any
    default: Any
    description: str

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return _bare(self.type) is bool

    @property
    def is_collection(self) -> bool:
        return typing.get_origin(_bare(self.type)) in (list, tuple, set, frozenset)


class _Given(msgspec.Struct, frozen=True):
    """A value and where it comes from, for error messages. `is_text`: from a flag or the environment."""

    value: Any
    source: str
    is_text: bool


def load(kind: type[T], *, section: str, argv: Sequence[str], environ: Mapping[str, str], path: Path | None = None) -> T:
    """`--help` prints the fields and ends the process.

    :raises ConfigError: names the key, where it was given, what is wrong, and the nearest known key if it is unknown.
    """
    fields = _fields(kind)
    flags, flag_path = _parse_flags(argv, fields)
    if flags is None:
        sys.stdout.write(help_text(kind, section=section))
        raise SystemExit(0)
    chosen = flag_path or (Path(environ[ENV_PREFIX + "CONFIG"]) if environ.get(ENV_PREFIX + "CONFIG") else path)
    given = _from_file(chosen, fields, section) if chosen is not None else {}
    for name in fields:
        variable = ENV_PREFIX + name.upper()
        if variable in environ:
            given[name] = _Given(environ[variable], variable, True)
    given.update(flags)
    values = {name: _convert(fields[name], value) for name, value in given.items()}
    return _build(kind, (), fields, values)


def help_text(kind: type[msgspec.Struct], *, section: str) -> str:
    """Every field with its default and description."""
    lines = [f"Settings of penstock's {section}: --field VALUE, {ENV_PREFIX}FIELD, or [{section}] of a TOML file.", ""]
    lines.append(f"  {'--config FILE':34} TOML file with [common] and [{section}]")
    for field in _fields(kind).values():
        default = "required" if field.default is msgspec.NODEFAULT else f"default: {_shown(field.default)}"
        lines.append(f"  {field.flag:34} {field.description}{' ' if field.description else ''}({default})")
    return "\n".join(lines) + "\n"


def to_argv(config: msgspec.Struct) -> list[str]:
    """The flags with which `load` gives an equal `config`: how a supervisor passes settings on. Defaults are left out."""
    argv: list[str] = []
    for field in _fields(type(config)).values():
        value: Any = config
        for step in field.path:
            value = getattr(value, step)
        if value != field.default:
            argv.append(f"{field.flag}={_shown(value)}")
    return argv


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(_shown(item) for item in value)
    return str(value)


def _bare(kind: Any) -> Any:
    """Without `Annotated` and `| None`."""
    if typing.get_origin(kind) is Annotated:
        return _bare(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, UnionType):
        rest = [member for member in typing.get_args(kind) if member is not type(None)]
        if len(rest) == 1:
            return _bare(rest[0])
    return kind


def _fields(kind: type[msgspec.Struct], path: tuple[str, ...] = ()) -> dict[str, _Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, _Field] = {}
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        bare = _bare(hint)
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
            inner = _fields(bare, (*path, field.name))
        else:
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            inner = {field.name: _Field((*path, field.name), hint, default, _description(hint))}
        if twice := found.keys() & inner.keys():
            raise TypeError(f"{kind.__name__} has two settings named {sorted(twice)}")
        found |= inner
    return found


def _description(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        for extra in typing.get_args(hint)[1:]:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra.description
    return ""


def _unknown(what: str, name: str, known: Iterable[str]) -> NoReturn:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    raise ConfigError(f"unknown {what} {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""), param=name)


def _parse_flags(argv: Sequence[str], fields: Mapping[str, _Field]) -> tuple[dict[str, _Given] | None, Path | None]:
    """The given flags, None when help is wanted; and the file that `--config` names."""
    by_flag = {field.flag: field for field in fields.values()}
    negated = {"--no-" + flag[2:]: field for flag, field in by_flag.items() if field.is_bool}
    found: dict[str, _Given] = {}
    path: Path | None = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return None, None
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --name VALUE", param=word)
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in negated and flag not in by_flag:
            if has_value:
                raise ConfigError(f"{flag} takes no value", param=flag)
            found[negated[flag].name] = _Given(False, flag, False)
            continue
        if flag not in by_flag and flag != "--config":
            _unknown("flag", flag, [*by_flag, "--config", "--help"])
        if flag != "--config" and by_flag[flag].is_bool and not has_value:
            found[by_flag[flag].name] = _Given(True, flag, False)
            continue
        if not has_value:
            if not rest:
                raise ConfigError(f"{flag} needs a value", param=flag)
            value = rest.pop(0)
        if flag == "--config":
            path = Path(value)
        else:
            found[by_flag[flag].name] = _Given(value, flag, True)
    return found, path


def _from_file(path: Path, fields: Mapping[str, _Field], section: str) -> dict[str, _Given]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="config") from error
    found: dict[str, _Given] = {}
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} belongs into a table, [common] or [{section}]", param=table)
        if table not in (*SECTIONS, section):
            _unknown(f"table in {path}:", table, (*SECTIONS, section))
    for table in ("common", section):
        for name, value in tables.get(table, {}).items():
            if name not in fields:
                _unknown(f"key in [{table}] of {path}:", name, fields)
            found[name] = _Given(value, f"{name} in [{table}] of {path}", False)
    return found


def _convert(field: _Field, given: _Given) -> Any:
    value = given.value
    if given.is_text and field.is_collection:
        value = [item.strip() for item in value.split(",") if item.strip()]
    try:
        return msgspec.convert(value, field.type, strict=not given.is_text, dec_hook=_decode_path)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{given.source}: {_sentence(error, field)}, got {given.value!r}", param=field.name) from error


def _sentence(error: Exception, field: _Field) -> str:
    bare = _bare(field.type)
    if typing.get_origin(bare) is typing.Literal:
        return f"expected one of {', '.join(str(choice) for choice in typing.get_args(bare) if choice != '')}"
    return str(error).split(" - at `$")[0].replace("`", "").replace("Expected", "expected")


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise ValueError(f"can't make a {kind.__name__} of it")


def _build(kind: type[T], path: tuple[str, ...], fields: Mapping[str, _Field], values: Mapping[str, Any]) -> T:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        here = (*path, field.name)
        setting = fields.get(field.name)
        if setting is not None and setting.path == here:
            if field.name in values:
                arguments[field.name] = values[field.name]
            elif setting.default is msgspec.NODEFAULT:
                raise ConfigError(f"{setting.flag} is required", param=field.name)
            continue
        nested = _bare(typing.get_type_hints(kind, include_extras=True)[field.name])
        arguments[field.name] = _build(nested, here, fields, values)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
