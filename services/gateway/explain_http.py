"""`GET /v1/explain/{id}`: one request's timeline, for whoever's it is, and for the operator."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.door import Door
from services.gateway.explainer import Explainer


def explain_routes(explainer: Explainer, door: Door) -> list[Route]:
    """What a gateway's HTTP port serves of it."""

    async def explain(request: Request) -> Response:
        """:raises Unauthorized, NotFound, Overloaded: see `Explainer.explain`."""
        tenant = door.authorize(request.scope)
        body = await explainer.explain(request.path_params["id"], None if tenant is None else tenant.name)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    return [Route("/v1/explain/{id}", explain, methods=["GET"])]
