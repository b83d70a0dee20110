"""Every error Penstock raises on purpose, and its code on the wire.

    PenstockError
    ├── RequestError            the client can mend it (4xx)
    │   ├── InvalidParameter        400  invalid_parameter
    │   ├── ReplyNotAllowed         400  reply_not_allowed  told to nobody: there is no subject to say it on
    │   ├── EmptyPrompt             400  empty_prompt
    │   ├── ContextLengthExceeded   400  context_length_exceeded
    │   ├── OriginNotAllowed        403  origin_not_allowed
    │   ├── Forbidden               403  forbidden          a key that is known, and may not do this
    │   ├── UnknownModel            404  model_not_found
    │   ├── NotFound                404  not_found
    │   ├── DuplicateRequest        409  duplicate_request
    │   ├── PayloadTooLarge         413  payload_too_large
    │   └── HostNotAllowed          421  host_not_allowed
    ├── ServiceError            the service can't do it now (5xx, 429)
    │   ├── Overloaded              429  overloaded
    │   ├── RateLimited             429  rate_limit_exceeded  a limit of this tenant's; others are served
    │   ├── Cancelled               499  cancelled
    │   ├── NoWorkers               503  no_workers
    │   ├── GatewayBusy             503  gateway_busy       it can't keep up with what it has
    │   ├── ShuttingDown            503  shutting_down
    │   ├── DeadlineExceeded        504  deadline_exceeded
    │   ├── WorkersDied             500  workers_died       workers ended each time that they ran it
    │   ├── JetStreamOff            501  no_jetstream       the NATS server keeps nothing, and this needs it
    │   ├── StorageFull             507  storage_full       files and batches fill the space there is for them
    │   ├── InvalidLogits           500  invalid_logits     the model's logits for this request are infinite, or NaN
    │   └── InternalError           500  internal_error     carries an id, never a repr
    ├── WorkerError             between workers; the gateway retries elsewhere
    │   ├── OutOfBlocks                  out_of_blocks
    │   ├── OutOfCredits                 out_of_credits
    │   ├── StaleHandle                  stale_handle        the lease or the epoch has ended
    │   ├── TransportUnavailable         transport_unavailable
    │   └── WorkerLost                   worker_lost
    ├── BusError
    │   ├── NoResponders                 no_responders      nobody listens on the subject: the process is gone
    │   ├── BusRefused                   bus_refused        the server wants other credentials
    │   ├── RequestTimeout               bus_timeout        somebody listens but did not answer
    │   ├── StreamConflict               stream_conflict    somebody else has written there meanwhile
    │   └── BusClosed                    bus_closed
    ├── ProtocolError           a message that can't be decoded
    └── ConfigError             names the key and the nearest known one

A code is stable once released: clients branch on it. `from_wire` turns a code back into its class.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """Root of the tree. `str(error)` is safe to show to a client and says what to do."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message or self.code.replace("_", " "))
        self.param = param


class RequestError(PenstockError):
    code = "invalid_request"
    http_status = 400


class InvalidParameter(RequestError):
    code = "invalid_parameter"


class ReplyNotAllowed(RequestError):
    code = "reply_not_allowed"


class EmptyPrompt(RequestError):
    code = "empty_prompt"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class OriginNotAllowed(RequestError):
    code = "origin_not_allowed"
    http_status = 403


class Forbidden(RequestError):
    code = "forbidden"
    http_status = 403


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404


class NotFound(RequestError):
    code = "not_found"
    http_status = 404


class DuplicateRequest(RequestError):
    code = "duplicate_request"
    http_status = 409


class PayloadTooLarge(RequestError):
    code = "payload_too_large"
    http_status = 413


class HostNotAllowed(RequestError):
    code = "host_not_allowed"
    http_status = 421


class ServiceError(PenstockError):
    code = "service_error"


class Overloaded(ServiceError):
    code = "overloaded"
    http_status = 429


class RateLimited(ServiceError):
    """`retry_after_s`: when the limit lets this request through, if nothing else comes."""

    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(ServiceError):
    code = "cancelled"
    http_status = 499


class NoWorkers(ServiceError):
    code = "no_workers"
    http_status = 503


class GatewayBusy(ServiceError):
    code = "gateway_busy"
    http_status = 503


class ShuttingDown(ServiceError):
    code = "shutting_down"
    http_status = 503


class DeadlineExceeded(ServiceError):
    code = "deadline_exceeded"
    http_status = 504


class WorkersDied(ServiceError):
    code = "workers_died"


class JetStreamOff(ServiceError):
    code = "no_jetstream"
    http_status = 501


class StorageFull(ServiceError):
    code = "storage_full"
    http_status = 507


class InvalidLogits(ServiceError):
    code = "invalid_logits"


class InternalError(ServiceError):
    code = "internal_error"


class WorkerError(PenstockError):
    code = "worker_error"
    http_status = 503


class OutOfBlocks(WorkerError):
    code = "out_of_blocks"

    def __init__(self, message: str = "", *, needed: int = 0, free: int = 0) -> None:
        super().__init__(message or f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class OutOfCredits(WorkerError):
    code = "out_of_credits"


class StaleHandle(WorkerError):
    code = "stale_handle"


class TransportUnavailable(WorkerError):
    code = "transport_unavailable"


class WorkerLost(WorkerError):
    code = "worker_lost"


class BusError(PenstockError):
    code = "bus_error"
    http_status = 503


class NoResponders(BusError):
    code = "no_responders"


class BusRefused(BusError):
    code = "bus_refused"


class RequestTimeout(BusError):
    code = "bus_timeout"


class StreamConflict(BusError):
    code = "stream_conflict"
    http_status = 409


class BusClosed(BusError):
    code = "bus_closed"


class ProtocolError(PenstockError):
    code = "protocol_error"
    http_status = 400


class ConfigError(PenstockError):
    code = "config_error"


def drop_frames(error: BaseException) -> None:
    """Forget where `error` and its causes were raised. The frames hold whatever they worked on, a prompt of megabytes perhaps,
    and are often in a reference cycle with the error, which only the garbage collector ends, at a time of its own choice."""
    seen: BaseException | None = error
    while seen is not None and seen.__traceback__ is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _codes(root: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _codes(child)
    return found


_BY_CODE = _codes(PenstockError)


def from_wire(code: str, message: str) -> PenstockError:
    """The error a peer named by `code`; an unknown code becomes an `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)
