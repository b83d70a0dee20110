"""Rules of the tree that no linter knows."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "services", "bench", "recipes", "tests", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MODULES = [path for path in SOURCES if path.name != "__init__.py"]
PRODUCT = [path for path in MODULES if "tests" not in path.relative_to(ROOT).parts]
MAX_LINES = 400


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_init_files_stay_empty() -> None:
    assert [name(path) for path in SOURCES if path.name == "__init__.py" and path.read_text().strip()] == []


def test_every_file_opens_with_what_it_is_for() -> None:
    assert [name(path) for path in MODULES if not read(path).docstring] == []


def test_no_file_is_two() -> None:
    assert [name(path) for path in PRODUCT if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_nothing_pickles() -> None:
    assert [name(path) for path in MODULES if imports(path) & {"pickle", "cloudpickle", "dill", "marshal"}] == []


def test_only_the_bus_imports_nats() -> None:
    allowed = {*(f"common/runtime/nats_{name}.py" for name in ("bus", "client", "micro")), "examples/raw_nats.py"}
    assert {name(path) for path in PRODUCT if "nats" in imports(path)} == allowed


def test_no_task_is_left_without_an_owner() -> None:
    pattern = re.compile(r"\b(create_task|ensure_future)\(")
    assert [name(path) for path in PRODUCT if pattern.search(path.read_text())] == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports in functions, by name and for type checkers count: a circle is two modules that are one."""
    assert circle_of(modules_imported(SOURCES)) == []


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from common.ops import backend\nfrom two.three import x\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "__init__.py").touch()
    (tmp_path / "two" / "three.py").write_text("def late():\n    from two import four\n")
    (tmp_path / "two" / "four.py").write_text("if TYPE_CHECKING:\n    import five\n")
    (tmp_path / "five.py").write_text("import importlib\nmodule = importlib.import_module('one')\n")
    found = modules_imported(sorted(tmp_path.rglob("*.py")), tmp_path)
    assert found == {"one": {"two.three"}, "two": set(), "two.three": {"two.four"}, "two.four": {"five"}, "five": {"one"}}
    assert set(circle_of(found)) == {"one", "two.three", "two.four", "five"}


def modules_imported(paths: list[Path], root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules among `paths` that each of them imports, anywhere in it. Packages are empty: their modules count."""
    known = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    packages = {module for module, path in known.items() if path.name == "__init__.py"}
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = (read(path).imported & known.keys()) - packages
    return found


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle in order, the first again at the end; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    return {module.split(".")[0] for module in read(path).imported}


class File(NamedTuple):
    """imported: modules, and what is imported from them as if it were one."""

    docstring: str | None
    imported: set[str]


@cache
def read(path: Path) -> File:
    """Parse a file, once for all tests."""
    tree, imported = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            imported |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return File(ast.get_docstring(tree), imported)


@pytest.mark.parametrize("service", ["gateway", "draft", "kvstore"])
def test_a_service_without_an_engine_starts_without_torch(service: str) -> None:
    heavy = "{'torch', 'transformers', 'triton'}"
    program = f"import sys, services.{service}.__main__; sys.exit(' '.join({heavy} & sys.modules.keys()) or 0)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def package_data(package: str) -> set[Path]:
    """Return the files beside its modules that a package is installed with."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert f"{package.split('.')[0]}*" in setuptools["packages"]["find"]["include"]
    folder = ROOT.joinpath(*package.split("."))
    return {path for pattern in setuptools["package-data"][package] for path in folder.glob(pattern)}


def test_the_page_is_part_of_the_package() -> None:
    page = ROOT / "services" / "gateway" / "page"
    assert package_data("services.gateway") == set(page.iterdir())
    assert page / "index.html" in package_data("services.gateway")


def test_shipped_heads_and_draft_models_are_part_of_the_package() -> None:
    models = ROOT / "common" / "models"
    folders = [path.parent for kind in ("heads", "drafts") for path in (models / kind).glob("*/config.json")]
    assert {folder.parent.name for folder in folders} == {"heads", "drafts"}
    assert package_data("common.models") == {path for folder in folders for path in folder.iterdir()}
