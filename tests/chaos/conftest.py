"""`site`: a whole Penstock of real processes for a module's tests, once with the real model and once with simulated engines."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from tests.chaos.site import REAL_ENGINE, SIMULATED_ENGINE, Site, real_jobs, simulated_jobs
from tests.e2e.stack import Stack
from tests.fixtures.nats import LocalNatsServer


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["simulated", pytest.param("smollm2", marks=pytest.mark.slow)]
)
async def shared_site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: ModelFiles
) -> AsyncIterator[Site]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    server = LocalNatsServer(directory / "nats")
    server.start()
    try:
        if request.param == "smollm2":
            jobs = itertools.cycle(await real_jobs(server, directory / "undisturbed", count=8, max_tokens=60))
            # every prompt takes the long way, however much of it is cached by now
            async with Stack(server.url, directory, engine_flags=REAL_ENGINE) as stack:
                yield Site(stack, server, jobs, clients=4, gateway_flags=("--direct-max-tokens", "-1"))
        else:
            async with Stack(server.url, directory, engine_flags=SIMULATED_ENGINE) as stack:
                yield Site(stack, server, simulated_jobs(smollm2), clients=24)
    finally:
        server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def site(shared_site: Site) -> Site:
    """Nothing is missing and nothing is held when a test begins."""
    await shared_site.make_whole()
    return shared_site
