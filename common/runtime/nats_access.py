"""Who may say and hear what on the bus: one NATS user for each role, with a password drawn at random. Pure.

    user      may publish to                                          may subscribe to
    gateway   inboxes of workers, its heartbeat, clients' inboxes,    requests, cancels, questions what became of a request,
              its streams                                             heartbeats, prefix caches, its inbox, its answers
    prefill   inboxes of roles it works with, its heartbeat,          heartbeats, its inbox, its answers
              what its prefix cache holds
    decode    the same                                                the same
    draft     inboxes of roles it works with, its heartbeat           the same
    kvstore   the same                                                the same
    client    requests, cancels, questions what became of any request its own inboxes, heartbeats
    others    requests, cancels                                       the same
    a tenant  requests, cancels and questions below its own subject   its own inboxes, its own usage
    monitor   $SRV.PING, $SRV.INFO, $SRV.STATS                        its own inboxes, heartbeats, usage of tenants

The inboxes of a user begin with its name, so that no user hears what another one is answered. Internal answers go to subjects
below the role that asked. A role's processes share its user: they trust each other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import msgspec

from common.protocol import subjects
from common.protocol.errors import ConfigError
from common.protocol.handles import Role

CLIENT, MONITOR = "client", "monitor"
ROLES: tuple[Role, ...] = get_args(Role)
USERS: tuple[str, ...] = (*ROLES, CLIENT, MONITOR)

WRITES_TO: Mapping[str, tuple[Role, ...]] = {
    "gateway": ("prefill", "decode", "draft", "kvstore"),
    "prefill": ("gateway", "decode", "kvstore"),
    "decode": ("gateway", "prefill", "draft", "kvstore"),
    "draft": ("decode",),
    "kvstore": ("prefill", "decode"),
}
"""Whose inboxes a role sends messages to, or looks whether they are there."""

TELL_CACHES: tuple[Role, ...] = ("prefill", "decode")
"""Roles that tell gateways what their prefix caches hold."""

PASSWORD_BYTES = 32


class Credentials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process connects with. The file format is that of a context of NATS's own command line, whose other fields are
    ignored. `creds`, `nkey`, `ca`, `cert` and `key` are paths. `tenant`: below whose subject its requests go."""

    url: str = ""
    user: str = ""
    password: str = ""
    creds: str = ""
    nkey: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    inbox_prefix: str = ""
    description: str = ""
    tenant: str = ""

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r}, user={self.user!r})"


class Permissions(msgspec.Struct, frozen=True):
    """Subjects, wildcards included, that a user may publish and subscribe to, and no others."""

    publish: Sequence[str]
    subscribe: Sequence[str]


def permissions(user: str, *, reply_prefixes: Sequence[str] = ("_INBOX.",), tenant: bool = False) -> Permissions:
    """What one of `USERS`, a further client, or a tenant of this name may do. `reply_prefixes`: the gateways' setting."""
    if user in WRITES_TO:
        return _of_role(user, reply_prefixes)
    if tenant:
        return Permissions([subjects.any_of_tenant(user)], [f"{inbox_prefix(user)}.>", subjects.usage(user)])
    own = [f"{inbox_prefix(user)}.>", subjects.any_presence()]
    if user == MONITOR:
        asked = [f"$SRV.{verb}{rest}" for verb in ("PING", "INFO", "STATS") for rest in ("", ".>")]
        return Permissions(asked, [*own, subjects.any_usage()])
    asks = [subjects.explain()] if user == CLIENT else []  # of anybody's requests, as whoever started Penstock may
    return Permissions([*_public(), subjects.any_cancel(), *asks], own)


def _public() -> list[str]:
    return [*subjects.any_request(), subjects.any_batch(), subjects.any_result()]


def _of_role(role: str, reply_prefixes: Sequence[str]) -> Permissions:
    publish = [
        subjects.presence_of(role),
        *(subjects.any_inbox_of(other) for other in WRITES_TO[role]),
        subjects.any_reply(),
        f"{inbox_prefix(MONITOR)}.>",
    ]
    subscribe = [subjects.any_inbox_of(role), subjects.any_presence(), f"{inbox_prefix(role)}.>", "$SRV.>"]
    if role in TELL_CACHES:
        publish.append(subjects.kv_events_of(role))
    if role == "gateway":
        publish += [*(f"{prefix}>" for prefix in reply_prefixes), subjects.any_usage(), subjects.kept(), *_stream_api()]
        subscribe += [*_public(), subjects.any_cancel(), subjects.explain(), subjects.any_of_tenants()]
        subscribe.append(subjects.any_kv_events())
    return Permissions(publish, subscribe)


def _stream_api() -> list[str]:
    """What JetStream asks of whoever makes the streams of files and batches, writes, reads, and works on what waits there."""
    api = "$JS.API"
    found = [f"{api}.INFO", f"$JS.ACK.{subjects.LINES}.>", f"{api}.CONSUMER.CREATE.{subjects.LINES}.>"]
    found.append(f"{api}.CONSUMER.MSG.NEXT.{subjects.LINES}.>")
    for stream in subjects.STREAMS:
        found += [f"{api}.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "PURGE")]
        found += [f"{api}.DIRECT.GET.{stream}", f"{api}.DIRECT.GET.{stream}.>"]
    return found


def inbox_prefix(user: str) -> str:
    """Where a user is answered: a role inside, anyone else below `_INBOX`."""
    return subjects.replies_of(user) if user in WRITES_TO else f"_INBOX.{user}"


def draw_credentials(url: str, users: Sequence[str] = USERS, *, tenants: Collection[str] = ()) -> dict[str, Credentials]:
    """New passwords for `users` and `tenants` of the server at `url`.

    :raises InvalidParameter: a name that can't be part of a subject. :raises ConfigError: a tenant has another user's name.
    """
    if taken := sorted(set(users) & set(tenants)):
        raise ConfigError(f"the bus has a user {taken[0]} who is no tenant: call the tenant otherwise", param="api_keys")
    return {
        user: Credentials(
            url=url,
            user=subjects.token(user, what="user"),
            password=secrets.token_urlsafe(PASSWORD_BYTES),
            inbox_prefix=inbox_prefix(user),
            description=f"Penstock, as {user}",
            tenant=user if user in tenants else "",
        )
        for user in (*users, *tenants)
    }


def server_config(credentials: Mapping[str, Credentials], *, reply_prefixes: Sequence[str] = ("_INBOX.",)) -> str:
    """The `authorization` block of a nats-server's configuration."""
    lines = ["authorization {", "  users: ["]
    for user, known in credentials.items():
        allowed = permissions(user, reply_prefixes=reply_prefixes, tenant=bool(known.tenant))
        lines += [
            f"    {{ user: {quoted(known.user)}, password: {quoted(known.password)}, permissions: {{",
            f"      publish: {{ allow: {quoted(list(allowed.publish))} }}",
            f"      subscribe: {{ allow: {quoted(list(allowed.subscribe))} }}",
            "    } }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def quoted(value: str | list[str]) -> str:
    """Return a string, or a list of them, as nats-server reads it: JSON, but for escapes of characters that are not ASCII."""
    return json.dumps(value, ensure_ascii=False)


def parse_credentials(data: bytes, name: str) -> Credentials:
    """:raises ConfigError: `data`, the content of the file `name`, is not in the format; the message holds nothing of it."""
    try:
        return msgspec.json.decode(data, type=Credentials)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} holds no NATS credentials: expected JSON with url, user and password") from error
