"""guidellm: a run against both of its kinds of requests, with every request answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import KEY, MODEL, Penstock, script


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_of_a_run_is_answered(simulated: Penstock, tmp_path: Path, path: str) -> None:
    prompts = [{"prompt": f"Say {word}.", "output_tokens_count": 8} for word in ("one", "two", "three", "four")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    script(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={simulated.url},api_key={KEY},model={MODEL},request_format={path}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=4",
        "--data",
        f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "--output",
        f"kind=json,path={tmp_path / 'report.json'}",
        "--disable-console",
    )
    [run] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert run["metrics"]["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert all(request["output_metrics"]["text_tokens"] == 8 for request in run["requests"]["successful"])
