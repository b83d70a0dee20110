"""Repositories of Hugging Face, in its own cache (HF_HOME): what is there, and what is fetched.

    owner/name[@revision]           config.json and *.safetensors
    owner/name:Q4_K_M[@revision]    of the repository's GGUF models the one whose name ends so

Of a GGUF model in parts, all are fetched. What a spec means depends on the repository alone, not on what of it is here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from common.models.fetching import Progress, PullFailed, reporting
from common.models.gguf_parts import gguf_parts
from common.models.naming import GGUF_PART, is_gguf
from common.protocol.errors import PenstockError, UnknownModel

_SMALL = ["*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
_FILES = ["*.safetensors", *_SMALL]
_IGNORED = ["*/*", "consolidated*"]  # other formats' copies of the same weights
_NOTHING = "/"
"""A pattern that no file's name matches: the client then asks for the folder alone."""
_LABEL = re.compile(r"(?:.*?[-.])?(?P<label>(?:UD-)?\w+)", re.IGNORECASE | re.DOTALL)
"""The end of a GGUF file's name: Q4_K_M, UD-Q4_K_XL, bf16."""
_NO_MODEL = ("mmproj", "imatrix")
"""How files begin that only go with a model: encoders of images, and what quantisation was guided by."""
_SHOWN = 12


def snapshot(match: re.Match[str]) -> Path | None:
    """Return the folder of a revision in the cache, or None. Without a label it must have all files that `fetch` brings; with
    one, `find_gguf` looks for the model's. match: of `naming.HUB_ID`."""
    from huggingface_hub import snapshot_download  # 0.3 s to import, needed for hub ids only

    wanted = [_NOTHING] if match["label"] else _FILES
    try:
        folder = snapshot_download(
            match["repo"],
            revision=match["revision"],
            local_files_only=True,
            allow_patterns=wanted,
            ignore_patterns=_IGNORED,
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def find_gguf(folder: Path, label: str) -> Path | None:
    """Return the first file of the GGUF model that a label means in a revision's folder, if all of its parts are here."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if is_gguf(file)]
    models = _models(names).get(label.lower(), [])
    if len(models) != 1:  # of several, `fetch` says so
        return None
    try:
        return gguf_parts(folder / models[0][0])[0]
    except UnknownModel:
        return None


def fetch(match: re.Match[str], report: Progress, check: Callable[[Path], None]) -> None:
    """Fetch what the id means. Several processes may do so at once. check: see `source.pull`.

    :raises PullFailed: if that failed, or the repository has no such model.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # `report` tells
    logging.set_verbosity_error()  # patterns that match nothing are expected
    repo, revision = match["repo"], match["revision"]
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    try:
        if match["label"]:
            files = _chosen(match, HfApi().list_repo_files(repo, revision=revision))
            with reporting(blobs, 0, report):
                snapshot_download(repo, revision=revision, allow_patterns=[_escaped(name) for name in files])
            return
        with reporting(blobs, 0, report):
            small = snapshot_download(repo, revision=revision, allow_patterns=_SMALL, ignore_patterns=_IGNORED)
            if (Path(small) / "config.json").is_file():
                check(Path(small))
            snapshot_download(repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED)
        if not any(Path(small).glob("*.safetensors")) and (models := _models(HfApi().list_repo_files(repo, revision=revision))):
            raise PullFailed(f"{repo} has no .safetensors weights; {_listed(repo, models)}", param="model")
    except PenstockError:
        raise
    except Exception as error:  # the hub client raises its own, its HTTP client's and OS errors, depending on its version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PullFailed(f"could not fetch {repo} from Hugging Face: {reason}", param="model") from error


def _chosen(match: re.Match[str], names: Iterable[str]) -> list[str]:
    """:raises PullFailed: if the repository has no such model, or several."""
    repo, label, models = match["repo"], match["label"], _models(names)
    found = models.get(label.lower(), [])
    if not found:
        listed = _listed(repo, models) if models else "and no other"
        raise PullFailed(f"{repo} has no GGUF model {label}; {listed}", param="model")
    if len(found) > 1:
        firsts = ", ".join(files[0] for files in found[:3])
        raise PullFailed(f"{repo} has several GGUF models {label}: {firsts}; fetch the file", param="model")
    return found[0]


def _models(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Return the files of each GGUF model, first part first, by its label in lower case."""
    models: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names):
        if not is_gguf(Path(name)) or PurePosixPath(name).name.lower().startswith(_NO_MODEL):
            continue
        part = GGUF_PART.fullmatch(PurePosixPath(name).with_suffix("").as_posix())
        models.setdefault((part["stem"], part["count"]) if part else (name,), []).append(name)
    found: dict[str, list[list[str]]] = {}
    for files in models.values():
        if label := _label(files[0]):
            found.setdefault(label.lower(), []).append(files)
    return found


def _label(name: str) -> str:
    """Return the label of a GGUF file's model; "" for none."""
    stem = PurePosixPath(name).stem
    part = GGUF_PART.fullmatch(stem)
    match = _LABEL.fullmatch(part["stem"] if part else stem)
    return match["label"] if match else ""


def _listed(repo: str, models: dict[str, list[list[str]]]) -> str:
    labels = sorted(_label(files[0]) for (files, *_) in models.values())
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return f"of its GGUF models name one, such as {repo}:{labels[0]}: {', '.join(labels[:_SHOWN])}{more}"


def _escaped(name: str) -> str:
    """Return a pattern that only this name matches."""
    return re.sub(r"([*?[])", r"[\1]", name)
