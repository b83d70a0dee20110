"""`with_template.py TEMPLATE OUT`: the default model's GGUF file with another chat template. Runs in Penstock's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from common.models.source import DEFAULT_MODEL, pull

NAME = "tokenizer.chat_template"


def main(template: str, out: str) -> None:
    reader = GGUFReader(pull(DEFAULT_MODEL).path)
    writer = GGUFWriter(out, arch=reader.fields["general.architecture"].contents(), endianess=reader.endianess)
    text = Path(template).read_text(encoding="utf-8")
    copy_with_new_metadata(reader, writer, {NAME: MetadataDetails(GGUFValueType.STRING, text)}, [])


if __name__ == "__main__":
    main(*sys.argv[1:])
