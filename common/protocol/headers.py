"""Every NATS header of the public subjects, the way `subjects.py` is the only place for subjects.

A client's request may carry REQUEST_ID, DEADLINE_MS, TRACEPARENT and TRACESTATE. Each reply carries REQUEST_ID and SEQUENCE,
and the first one perhaps WARNING. The last one carries FINAL, and if the request failed ERROR and ERROR_CODE (the NATS micro
framework's names, so that standard tools show them), after a limit RETRY_AFTER. What `batch`, `result` and `explain` answer is
one message, without SEQUENCE.
"""

from __future__ import annotations

REQUEST_ID = "Penstock-Request-Id"
"""Names the request, for `subjects.cancel`. The gateway mints one when the client sends none.

A minted id is a secret of the client's: whoever publishes to `subjects.cancel` of it cancels the request. A name that the
client chose is no secret and belongs to its inbox: others may choose it too, and a cancel has that inbox as reply subject."""

DEADLINE_MS = "Penstock-Deadline-Ms"
"""Milliseconds the request may take, from when the gateway takes it."""

TRACEPARENT = "traceparent"
"""W3C trace context: the span that the request's spans are children of, where traces are on. Replies carry it, too."""

TRACESTATE = "tracestate"
"""The vendors' part of the W3C trace context."""

SEQUENCE = "Penstock-Sequence"
"""0, 1, 2 … over the replies of one request. A gap: some were lost, since the client read too slowly or the bus went away.
A number again: the same reply, sent twice because the bus went away before it was known to have arrived; ignore it."""

FINAL = "Penstock-Final"
"""`1` on the last reply; nothing follows."""

WARNING = "Penstock-Warning"
"""On the first reply: which arguments of the request had no effect. Over HTTP it is the `warning` header."""

ERROR = "Nats-Service-Error"
"""What went wrong and what to do, for people."""

RETRY_AFTER = "Penstock-Retry-After"
"""With the error `rate_limit_exceeded`: seconds until the limit lets the request through."""

ERROR_CODE = "Nats-Service-Error-Code"
"""One of the codes of `errors.py`, for programs."""

TENANT = "Penstock-Tenant"
"""On a kept line of a batch, and on the note that a batch needs a gateway: whose it is. Absent: nobody's in particular."""

OUTCOME = "Penstock-Outcome"
"""On the kept result of a line: `completed` or `failed`."""
