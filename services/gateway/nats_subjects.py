"""The public subjects of a gateway on NATS."""

from __future__ import annotations

import msgspec

from common.protocol import subjects
from common.runtime.bus import Endpoint
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.views.registry import RequestKind


class Listed(msgspec.Struct, frozen=True):
    """A public subject: what is asked for there, of which model."""

    kind: RequestKind
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
            public: tuple[tuple[RequestKind, str, str], ...] = (
                ("chat", "chat", subjects.chat(slug)),
                ("completion", "completions", subjects.completions(slug)),
                ("responses", "responses", subjects.responses(slug)),
                ("messages", "messages", subjects.messages(slug)),
                ("embedding", "embeddings", subjects.embeddings(slug)),
                ("score", "score", subjects.score(slug)),
                ("input_tokens", "input_tokens", subjects.input_tokens(slug)),
                ("count_tokens", "count_tokens", subjects.count_tokens(slug)),
                ("tokenize", "tokenize", subjects.tokenize(slug)),
                ("detokenize", "detokenize", subjects.detokenize(slug)),
            )
            for kind, title, subject in public:
                endpoint = Endpoint(name=f"{title}{suffix}", subject=subject, queue=subjects.GATEWAY_QUEUE)
                found.setdefault(subject, Listed(kind, model, endpoint))
                if tenants:
                    every = subjects.of_any_tenant(subject)
                    endpoint = Endpoint(name=f"tenants-{title}{suffix}", subject=every, queue=subjects.GATEWAY_QUEUE)
                    found.setdefault(every, Listed(kind, model, endpoint))
    return list(found.values())
