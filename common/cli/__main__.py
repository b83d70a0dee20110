"""`python -m common.cli` is `penstock`, where only modules can be named (the container image's entry point)."""

from __future__ import annotations

from common.cli.main import main

main()
