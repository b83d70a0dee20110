"""openai-npm and the Vercel AI SDK, each check a process of node."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from running import KEY, MODEL, Penstock

NPM = Path(__file__).parent / "npm"
NODE = shutil.which("node") or ""

pytestmark = [
    pytest.mark.npm,
    pytest.mark.skipif(not NODE, reason="there is no node"),
    pytest.mark.skipif(not (NPM / "node_modules").is_dir(), reason="no packages: `npm ci` in tests/clients/npm fetches them"),
]


@pytest.mark.parametrize(
    ("file", "check"),
    [
        *(("openai.mjs", check) for check in ("chat", "completions", "parse", "tools", "forced", "models", "errors")),
        *(("ai.mjs", check) for check in ("text", "object", "tools", "forced")),
    ],
)
def test_a_client_of_npm(penstock: Penstock, file: str, check: str) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": penstock.v1, "OPENAI_API_KEY": KEY, "MODEL": MODEL}
    ended = subprocess.run(
        [NODE, file, check], cwd=NPM, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
