"""Loaded by schemathesis (SCHEMATHESIS_HOOKS). A fuzzer asks for deadlines of a millisecond, and 504 is the right answer then:
such requests get time, so that every 5xx that is left is a fault."""

from __future__ import annotations

from typing import Any

import schemathesis

LEAST_S = 30


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    for name in [name for name in case.headers or {} if name.lower() == "penstock-deadline-ms"]:
        value = str(case.headers[name])
        if value.isascii() and value.isdigit() and int(value) < 1000 * LEAST_S:
            del case.headers[name]
    timeout = case.body.get("timeout") if isinstance(case.body, dict) else None
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < LEAST_S:
        case.body["timeout"] = LEAST_S
