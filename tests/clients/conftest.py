"""Clients as people use them, against Penstock as people start it. `make clients` runs them; nothing here imports Penstock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.update(
    {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
)

from running import KEY, PAGE, PYTHON, ROOT, SIMULATED, Penstock, penstock_up  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's weights with a chat template that shows tools, as those of larger models do."""
    copy = tmp_path_factory.mktemp("model") / "smollm2-tools.gguf"
    command = [PYTHON, str(HERE / "with_template.py"), str(HERE / "tools_template.jinja"), str(copy)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0"}, check=True)
    return copy


@pytest.fixture(scope="session")
def penstock(model: Path) -> Iterator[Penstock]:
    """Real weights. Its URL and key are in the environment as well, where clients look for them."""
    with penstock_up("--model", str(model), "--allow-origin", PAGE) as site:
        os.environ.update({"OPENAI_BASE_URL": site.v1, "OPENAI_API_BASE": site.v1, "OPENAI_API_KEY": KEY})
        yield site


@pytest.fixture(scope="session")
def simulated(model: Path) -> Iterator[Penstock]:
    """The simulated engine, for tests of which the text does not matter."""
    with penstock_up("--model", str(model), "--max-model-len", "512", environment=SIMULATED) as site:
        yield site
