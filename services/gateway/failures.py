"""What an error says about a request: is it the request's, the worker's, or nobody's fault? Pure."""

from __future__ import annotations

from common.protocol import errors
from common.protocol.errors import PenstockError

_REFUSALS = (errors.OutOfCredits, errors.OutOfBlocks, errors.ShuttingDown, errors.NoResponders, errors.BusClosed)
_LOSSES = (errors.WorkerLost, errors.StaleHandle, errors.TransportUnavailable, errors.Cancelled)


def is_refusal(error: PenstockError) -> bool:
    """Nothing was taken and nothing is wrong with the request: it waits for another place, as often as need be."""
    return isinstance(error, _REFUSALS)


def is_loss(error: PenstockError) -> bool:
    """A worker went away, or the KV did: the next attempt is not held against the request."""
    return isinstance(error, (*_REFUSALS, *_LOSSES))


def is_final(error: PenstockError) -> bool:
    """Another worker would say the same."""
    return isinstance(error, (errors.RequestError, errors.DeadlineExceeded))


def for_client(error: PenstockError) -> PenstockError:
    """What a client is told when every attempt failed: never a worker's own words."""
    if isinstance(error, (errors.RequestTimeout, errors.WorkerError)):
        return errors.NoWorkers("no worker could finish the request; try again")
    if isinstance(error, errors.InvalidLogits):
        return errors.InvalidLogits("the model's logits for this request are infinite or NaN, on every worker that tried")
    return errors.InternalError("every attempt to run the request failed; the workers' logs name the cause")
