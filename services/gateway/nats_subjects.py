"""The public subjects of a gateway on NATS."""

from __future__ import annotations

import msgspec

from common.protocol import subjects
from common.runtime.bus import Endpoint
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.token_bodies import TokenKind
from services.gateway.views.view import ViewName


class Listed(msgspec.Struct, frozen=True):
    """A public subject: what is asked for there, of which model."""

    kind: ViewName | TokenKind
    model: OfferedModel
    endpoint: Endpoint


def listed(catalog: Catalog, *, tenants: bool) -> list[Listed]:
    """The subjects of every name of `catalog`. Names with one slug, which are one model's, share a subject. `tenants`: also
    those of tenants."""
    found: dict[str, Listed] = {}
    for model in catalog.models:
        for name in model.names:
            slug = subjects.slug(name)
            suffix = f"-{slug}" if found and name != catalog.models[0].name else ""
            public: tuple[tuple[ViewName | TokenKind, str, str], ...] = (
                ("chat", "chat", subjects.chat(slug)),
                ("completion", "completions", subjects.completions(slug)),
                ("responses", "responses", subjects.responses(slug)),
                ("messages", "messages", subjects.messages(slug)),
                ("tokenize", "tokenize", subjects.tokenize(slug)),
                ("detokenize", "detokenize", subjects.detokenize(slug)),
            )
            for view, title, subject in public:
                endpoint = Endpoint(name=f"{title}{suffix}", subject=subject, queue=subjects.GATEWAY_QUEUE)
                found.setdefault(subject, Listed(view, model, endpoint))
                if tenants:
                    every = subjects.of_any_tenant(subject)
                    endpoint = Endpoint(name=f"tenants-{title}{suffix}", subject=every, queue=subjects.GATEWAY_QUEUE)
                    found.setdefault(every, Listed(view, model, endpoint))
    return list(found.values())
