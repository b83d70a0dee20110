"""Two models and two tenants under mixed load with kills, in real time: `python -m bench.mixed_load`.

    python -m bench.mixed_load --minutes 30              everything at once, every answer checked
    python -m bench.mixed_load --disk --hosts 2          the same, with the kvstore's disk and KV over NIXL
    python -m bench.mixed_load --greedy --turns 3        what a greedy tenant does to the other's first tokens

With `CHAOS=nixl_fail=16 PYTHONPATH=tests/chaos/inject` in the environment every 16th operation of NIXL fails.
Real processes of `penstock up --config` with two gateways, on a real nats-server with JetStream and a login for each tenant.
The models are made here, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from bench.common import request
from bench.common.machine import describe
from bench.mixed_load import greedy, mixed, report
from bench.mixed_load.outages import WEIGHTS
from common.protocol.errors import PenstockError
from common.runtime import logs


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = request.parser("bench.mixed_load", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the mixed load")
    parser.add_argument("--requests", type=int, default=0, help="the mixed load ends with so many answers; 0: by time alone")
    parser.add_argument("--disk", action="store_true", help="the kvstore keeps KV blocks on a disk too")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="2: KV goes from prefill to decode over NIXL")
    parser.add_argument("--clients", type=int, default=8, help="clients, one request at a time each")
    parser.add_argument("--think-s", type=float, default=0.5, help="mean pause of a client between requests")
    parser.add_argument("--kill-every-s", type=float, default=12.0, help="mean time between kills and pauses")
    parser.add_argument("--blows", nargs="*", choices=list(WEIGHTS), default=list(WEIGHTS), help="roles to kill; pauses")
    parser.add_argument("--salt-every-s", type=float, default=2.0, help="pause between checks of others' prefixes")
    parser.add_argument("--batch-lines", type=int, default=300, help="lines of each batch")
    parser.add_argument("--per-kind", type=int, default=8, help="different requests of each kind")
    parser.add_argument("--greedy", action="store_true", help="measure a greedy tenant beside a modest one instead")
    parser.add_argument("--engine", choices=("simulated", "real", "gpu"), default="simulated", help="of --greedy")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of --greedy --engine gpu: the model, with random weights")
    parser.add_argument("--prefill", type=int, default=0, help="of --greedy --engine gpu: prefill workers, a GPU each")
    parser.add_argument("--max-running", type=int, default=32, help="of --greedy: requests that a worker runs at once")
    parser.add_argument("--time-scale", type=float, default=2.0, help="of --greedy: slowness of the simulated engine")
    parser.add_argument("--turns", type=int, default=3, help="of --greedy")
    parser.add_argument("--turn-s", type=float, default=60.0, help="of --greedy: seconds of each half of a turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where models, settings and logs go, and stay; it must not be there yet")
    options = parser.parse_args(argv)
    if options.minutes <= 0 or min(options.clients, options.per_kind, options.batch_lines) < 1:
        parser.error("minutes, clients, requests of a kind and lines of a batch must be positive")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    logs.configure("error", "console")
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-mixed-") as temporary:
        folder = options.folder or Path(temporary) / "site"
        folder.mkdir(parents=True)
        try:
            return (_greedy if options.greedy else _mixed)(options, folder.resolve())
        except PenstockError as error:
            print(f"bench.mixed_load: {error}", file=sys.stderr)
            return 1


def _mixed(options: argparse.Namespace, folder: Path) -> int:
    names = mixed.MixedOptions.__struct_fields__
    found = anyio.run(mixed.run, mixed.MixedOptions(**{name: getattr(options, name) for name in names}), folder)
    print(report.mixed(found))
    return 0 if found.is_right else 1


def _greedy(options: argparse.Namespace, folder: Path) -> int:
    names = greedy.GreedyRun.__struct_fields__
    found = anyio.run(greedy.run, greedy.GreedyRun(**{name: getattr(options, name) for name in names}), folder)
    print(report.greedy(found))
    return 0 if report.is_fair(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
