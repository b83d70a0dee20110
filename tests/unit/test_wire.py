"""Earlier versions can be talked to: what they know of messages, as `tests/data/wire.txt` has it, is as it was.

The file has a line for each field of each structure between services. Lines are only ever added: a reader fills in what it was
not sent, and skips what it does not know, but for arrays, which are read by position. After a field or a structure was added:

    python -m tests.unit.test_wire >> tests/data/wire.txt
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from common.cache import prefix
from common.cache.prefix import hash_chain
from common.engine.load.layout import EngineConfig, cache_layout
from common.models.config import config_from_json
from common.models.shapes import shape
from common.protocol.document import document
from common.transfer import segment_file
from common.transfer.segment_file import GENERATIONS_OFFSET, Header

WIRE = Path(__file__).parents[1] / "data" / "wire.txt"
_FIELD = re.compile(r"\| `(\w+)` \| (`.*`) \| (.*) \|")
_FIELDS_WITHIN = re.compile(r"(?<=\w)\(.+\)")
"""Of a default that is a structure, whose fields have lines of their own."""
REQUIRED = "required"


def fields() -> list[str]:
    """Return what the document of the protocol says of each field, a line each: structure, position in an array, type, default;
    and the values of each type that has a few."""
    found: list[str] = []
    struct, position = "", 0
    for line in document().partition("## Who a worker is")[2].splitlines():
        if line.startswith("### "):
            struct, position = line.removeprefix("### "), 0
        elif line.startswith("`") and " is one of " in line:
            found.append(line)
        elif match := _FIELD.fullmatch(line):
            place = f"[{position}]" if "array" in struct else ""
            default = _FIELDS_WITHIN.sub("(…)", match[3])
            found.append(f"{struct.split()[0]}{place} {match[1]}: {match[2]} {default}")
            position += 1
    return found


def test_fields_are_as_earlier_versions_know_them_and_new_ones_have_defaults() -> None:
    known, today = WIRE.read_text().splitlines(), fields()
    assert [line for line in known if line not in today] == [], "changed or gone: earlier versions read and write these"
    added = [line for line in today if line not in known]
    structs = {re.split(r"\W", line)[0] for line in known}
    needed = [line for line in added if re.split(r"\W", line)[0] in structs and line.endswith(f" {REQUIRED}")]
    assert needed == [], "earlier versions do not send these: give them defaults"
    assert added == [], "add them: python -m tests.unit.test_wire >> tests/data/wire.txt"


def test_blocks_that_are_hashed_or_laid_out_otherwise_have_another_fingerprint() -> None:
    """Workers and stores of two versions pass by each other then, instead of offering what the other one can't find or read."""
    hashes = hash_chain(range(8), 4, fingerprint="f", salt=b"s")
    assert hashes[-1].hex() == "478d40b53b3797a7c94cadeda1549260", "raise prefix.HASHES"
    header = Header(num_blocks=3, block_bytes=64, device_memory=b"memory")
    digest = hashlib.blake2b(header.pack("f"), digest_size=8).hexdigest()
    assert digest == "ee8fa77797bc6eb8", "raise segment_file.VERSION"
    assert (GENERATIONS_OFFSET, header.progress_offset, header.blocks_offset) == (128, 152, 4096), "raise segment_file.VERSION"


@pytest.mark.parametrize(("module", "name"), [(prefix, "HASHES"), (segment_file, "VERSION")])
def test_the_fingerprint_says_how_blocks_are_hashed_and_laid_out(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    model, engine = config_from_json(shape("llama-3.2-1b")), EngineConfig()
    before = cache_layout(model, engine).fingerprint
    monkeypatch.setattr(module, name, getattr(module, name) + 1)
    assert cache_layout(model, engine).fingerprint != before


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in fields() if line not in WIRE.read_text().splitlines()))
