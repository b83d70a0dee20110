"""schemathesis over `/openapi.json`: whatever it makes up, no answer is a 5xx or one that the document does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import KEY, Penstock, script

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_no_answer_is_a_5xx_or_undocumented(
    simulated: Penstock, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    script(
        "schemathesis",
        "run",
        f"{simulated.url}/openapi.json",
        "--header",
        f"Authorization: Bearer {key}",
        "--phases=coverage,fuzzing",
        f"--checks={','.join(CHECKS)}",
        "--exclude-path=/dashboard/events",  # it never ends
        "--max-examples=25" if key == KEY else "--max-examples=3",
        f"--max-time={40 if key == KEY else 10}",
        "--generation-deterministic",
        "--request-timeout=60",
        "--warnings=off",
        "--no-color",
    )
