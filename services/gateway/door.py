"""Who comes in at the edges: HTTP clients by their key, NATS clients by the tenant that their subject names.

There is one operator's key (`--api-key`), which has no limits, and there are tenants' (`--api-keys`), or neither: then everyone
comes in. The file of tenants is looked at once a second, and a changed one takes effect as a whole; one that can't be used
changes nothing, and is logged.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.types import Scope

from common.protocol.errors import ConfigError, Forbidden
from common.runtime import api_keys, logs
from common.runtime.api_keys import KeyFile
from services.gateway.config import GatewayConfig
from services.gateway.http_io import Unauthorized, sent_key
from services.gateway.tenants import Tenant, Visit
from services.gateway.usage import UsageEvent

log = logs.get("gateway")

LOOK_EVERY_S = 1.0

_Stamp = tuple[int, int, int]


class Door:
    """One per gateway process. `tenants` by name."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        on_usage: Callable[[UsageEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:raises ConfigError: the key or the file of keys can't be used."""
        self._clock = clock
        self._on_usage = on_usage
        self._operator = api_keys.digest(config.key.encode()) if config.key else b""
        self._path = Path(config.api_keys) if config.api_keys else None
        self._owners: Mapping[bytes, Tenant] = {}
        self.tenants: Mapping[str, Tenant] = {}
        self._stamp: _Stamp | None = None
        if self._path is not None:
            self._stamp, file = _read(self._path)
            self._take(file)

    @property
    def has_tenants(self) -> bool:
        """Whether there is a file of tenants."""
        return self._path is not None

    def authorize(self, scope: Scope) -> Tenant | None:
        """Whose request this is; None for the operator's, or anyone's where there are no keys.

        :raises Unauthorized: it has no key that is known here.
        """
        if not self._operator and self._path is None:
            return None
        sent = api_keys.digest(sent_key(scope))
        if self._operator and hmac.compare_digest(sent, self._operator):
            return None
        tenant = self._owners.get(sent)
        if tenant is None:
            raise Unauthorized("wrong or missing API key: send it as `Authorization: Bearer <key>`, or as `x-api-key`")
        return tenant

    def authorize_overview(self, scope: Scope) -> None:
        """What shows everyone's requests: the dashboard, and metrics of tenants.

        :raises Unauthorized: without a key. :raises Forbidden: with one of a tenant's that may not see it.
        """
        tenant = self.authorize(scope)
        if tenant is not None and not tenant.settings.dashboard:
            raise Forbidden(f"{tenant.name} may not see this: it shows everyone's requests")

    def tenant(self, name: str) -> Tenant:
        """The tenant of a subject.

        :raises Forbidden: there is none of that name.
        """
        tenant = self.tenants.get(name)
        if tenant is None:
            raise Forbidden(f"there is no tenant {name[:100]!r} here")
        return tenant

    def enter(self, tenant: Tenant | None) -> Visit | None:
        """:raises RateLimited: the tenant has taken all that it may."""
        return None if tenant is None else tenant.enter(self._clock())

    async def watch(self) -> None:
        """Follow changes of the file, until cancelled."""
        while self._path is not None:
            await anyio.sleep(LOOK_EVERY_S)
            await self.look(self._path)

    async def look(self, path: Path) -> None:
        """Take the file if it is another one than before."""
        stamp = await anyio.to_thread.run_sync(_stamp, path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._stamp, file = await anyio.to_thread.run_sync(_read, path)
        except ConfigError as error:
            log.error("api_keys_kept", reason=str(error), advice="mend the file; until then keys and limits stay as they were")
            return
        self._take(file)
        log.info("api_keys_taken", tenants=len(self.tenants), keys=len(self._owners))

    def _take(self, file: KeyFile) -> None:
        """Everything at once. A tenant that stays keeps what it has used up."""
        now = self._clock()
        tenants: dict[str, Tenant] = {}
        for name, settings in file.tenants.items():
            tenant = self.tenants.get(name)
            if tenant is None:
                tenant = Tenant(name, settings, now)
                tenant.on_usage = self._on_usage
            elif tenant.settings != settings:
                tenant.change(settings, now)
            tenants[name] = tenant
        self.tenants = tenants
        self._owners = {digest: tenants[name] for digest, name in file.owners.items()}


def _stamp(path: Path) -> _Stamp | None:
    """What tells one content of a file from another; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[_Stamp | None, KeyFile]:
    """:raises ConfigError: it can't be read, or is no file of keys."""
    return _stamp(path), api_keys.read(path)  # in this order: what is written between is read again
