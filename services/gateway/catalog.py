"""The models of a gateway, by the names that clients ask for. Both edges read requests through it.

    body ─► parsed once ─► `model` names one of them ─► checked and tokenized for that one ─► a `Job`

A model has a name and may have aliases. A request that names none is for the only model that there is, or, over NATS, for the
one whose subject it came on.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.protocol.errors import InvalidParameter, RequestError, UnknownModel
from common.text.bundle import TextBundle
from services.gateway.answer import OfferedCore
from services.gateway.arguments import Notes
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from services.gateway.job import Job
from services.gateway.logprobs import TokenNames
from services.gateway.metrics import EdgeMetrics
from services.gateway.openai import ChatRequest
from services.gateway.parse import SMALL_BYTES
from services.gateway.parse_tokens import parse_detokenize, parse_tokenize
from services.gateway.prepare import Preparer
from services.gateway.tenants import Tenant
from services.gateway.token_bodies import TokenKind
from services.gateway.tokenizing import Tokenizing
from services.gateway.vector_prepare import VectorJob, VectorPreparer
from services.gateway.vectors import VectorKind, parse_vectors
from services.gateway.views.registry import VIEWS
from services.gateway.views.view import Parsed, View, ViewName
from services.gateway.whole import Pieces

MAX_LISTED = 32
"""Names that an error lists."""


class OfferedModel:
    """One model as the edges see it. `core` runs its requests; `config` is that of a gateway which serves it alone."""

    def __init__(self, core: OfferedCore, bundle: TextBundle, config: GatewayConfig, intake: Intake) -> None:
        self.core = core
        self.bundle = bundle
        self.name = bundle.name
        self.aliases = tuple(alias for alias in dict.fromkeys(config.aliases) if alias != bundle.name)
        self.preparer = Preparer(bundle, config, intake, lambda: self.max_context)
        self.vectors = VectorPreparer(bundle, config, intake, lambda: self._held(core.longest_read))
        self.tokenizing = Tokenizing(bundle, intake, lambda: self.max_context)
        self.token_names = TokenNames.of(bundle.tokenizer)
        self.metrics = EdgeMetrics.of(core.metrics, bundle.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases."""
        return self.name, *self.aliases

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together: the model's context, or what a worker holds, if that is less."""
        return self._held(self.core.longest)

    def _held(self, longest: int) -> int:
        return min(self.bundle.max_context, longest or self.bundle.max_context)


class Catalog:
    """`models` are one at least, and no two share a name."""

    def __init__(self, models: Sequence[OfferedModel], config: GatewayConfig, intake: Intake) -> None:
        self.models = models
        self.intake = intake
        self._strict = config.strict
        self._by_name = {name: model for model in models for name in model.names}
        self._longest_prompt = max(model.bundle.max_context for model in models) - 1

    @classmethod
    def of_one(cls, core: OfferedCore, bundle: TextBundle, config: GatewayConfig, intake: Intake | None = None) -> Catalog:
        """The catalog of a gateway with one model."""
        intake = intake or Intake(config)
        return cls([OfferedModel(core, bundle, config, intake)], config, intake)

    @property
    def names(self) -> list[str]:
        """Every model's name and aliases."""
        return list(self._by_name)

    def find(self, name: str, tenant: Tenant | None = None) -> OfferedModel:
        """The model of that name. `tenant`: who asks.

        :raises UnknownModel: no model has that name; the message lists those that `tenant` may use.
        :raises Forbidden: it may not use this one.
        """
        model = self._by_name.get(name)
        if model is None:
            raise UnknownModel(f"the model {name[:100]!r} is not served here; {self._listed(tenant)}", param="model")
        if tenant is not None:
            tenant.check_model(model.name)
        return model

    def choose(self, name: str | None, *, of_subject: OfferedModel | None = None, tenant: Tenant | None = None) -> OfferedModel:
        """The model for a request that says `name`. `of_subject`: whose subject it came on, over NATS. `tenant`: whose it is.

        :raises UnknownModel: no model has that name, or the subject is another one's.
        :raises InvalidParameter: none is named, and there are several.
        :raises Forbidden: `tenant` may not use it.
        """
        if name is None:
            if of_subject is None and len(self.models) > 1:
                raise InvalidParameter(f"model is missing: {self._listed(tenant)} served here", param="model")
            return self.find((of_subject or self.models[0]).name, tenant)
        model = self.find(name, tenant)
        if of_subject is not None and model is not of_subject:
            raise UnknownModel(
                f"the model {name[:100]!r} is not served on this subject; {of_subject.name} is: publish to the subject of "
                f"{model.name}",
                param="model",
            )
        return model

    async def prepare(
        self,
        view_name: ViewName,
        body: bytes,
        *,
        id: str,
        shown_id: str = "",
        deadline_ms: str | None = None,
        stream_default: bool = False,
        of_subject: OfferedModel | None = None,
        tenant: Tenant | None = None,
    ) -> tuple[OfferedModel, Job, Notes]:
        """The model that `body` is for, the job, and what of the body had no effect. `tenant`: whose request it is.

        :raises RequestError: what is wrong with the request; nothing has been taken then.
        """
        notes = Notes(strict=self._strict)
        is_large = len(body) > SMALL_BYTES
        view = VIEWS[view_name]
        request, writers = await self._read(view, body, notes)
        model = self.choose(request.model, of_subject=of_subject, tenant=tenant)
        try:
            job = await model.preparer.prepare(
                request,
                notes,
                writers=writers,
                id=id,
                shown_id=shown_id,
                deadline_ms=deadline_ms,
                stream_default=stream_default,
                is_large=is_large,
                tenant=tenant,
            )
        except RequestError as error:
            raise view.in_its_terms(error) from error
        return model, job, notes

    async def count(
        self, view: View, body: bytes, tenant: Tenant | None = None, *, of_subject: OfferedModel | None = None
    ) -> tuple[int, Notes]:
        """How many tokens the prompt in `body` has, and what of the body had no effect. `tenant`: whose request it is.

        :raises RequestError: what is wrong with the request.
        """
        notes = Notes(strict=self._strict)
        request, _ = await self._read(view, body, notes)
        model = self.choose(request.model, of_subject=of_subject, tenant=tenant)
        try:
            assert isinstance(request, ChatRequest)
            return await model.preparer.count(request, notes, is_large=len(body) > SMALL_BYTES), notes
        except RequestError as error:
            raise view.in_its_terms(error) from error

    async def _read(self, view: View, body: bytes, notes: Notes) -> Parsed:
        steps = view.parse(body, max_prompt_tokens=self._longest_prompt, notes=notes)
        return await self.intake.run(steps, large=len(body) > SMALL_BYTES)

    async def prepare_vectors(
        self,
        kind: VectorKind,
        body: bytes,
        *,
        id: str,
        deadline_ms: str | None = None,
        of_subject: OfferedModel | None = None,
        tenant: Tenant | None = None,
    ) -> tuple[OfferedModel, VectorJob, Notes]:
        """The model that `body` is for, the job, and what of the body had no effect.

        :raises RequestError: what is wrong with the request; nothing has been taken then.
        """
        notes = Notes(strict=self._strict)
        steps = parse_vectors(kind, body, max_prompt_tokens=self._longest_prompt, notes=notes)
        request = await self.intake.run(steps, large=len(body) > SMALL_BYTES)
        model = self.choose(request.model, of_subject=of_subject, tenant=tenant)
        job = await model.vectors.prepare(request, notes, id=id, deadline_ms=deadline_ms, tenant=tenant)
        return model, job, notes

    async def tokens(
        self, kind: TokenKind, body: bytes, tenant: Tenant | None = None, *, of_subject: OfferedModel | None = None
    ) -> tuple[OfferedModel, Pieces, Notes]:
        """The model that `body` is for, the answer's body, and what of `body` had no effect.

        :raises RequestError: what is wrong with the request.
        """
        notes = Notes(strict=self._strict)
        is_large = len(body) > SMALL_BYTES
        if kind == "tokenize":
            text = await self.intake.run(parse_tokenize(body, notes), large=is_large)
            model = self.choose(text.model, of_subject=of_subject, tenant=tenant)
            return model, await model.tokenizing.tokenize(text, notes), notes
        limit = max(model.tokenizing.max_tokens for model in self.models)
        ids = await self.intake.run(parse_detokenize(body, notes, max_tokens=limit), large=is_large)
        model = self.choose(ids.model, of_subject=of_subject, tenant=tenant)
        return model, await model.tokenizing.detokenize(ids), notes

    def _listed(self, tenant: Tenant | None) -> str:
        names = [name for name, model in self._by_name.items() if tenant is None or tenant.may_use(model.name)]
        if not names:
            return "none is"
        shown = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
        return f"{shown} {'is' if len(names) == 1 else 'are'}"
