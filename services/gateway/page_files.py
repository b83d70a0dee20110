"""The files of the gateway's pages: `page/`, which anyone may load.

They load nothing from elsewhere, and their Content-Security-Policy has the browser see to that.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FILES = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@functools.cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The files by name: content and entity tag."""
    contents = {path.name: path.read_bytes() for path in sorted(FILES.iterdir()) if path.suffix in MEDIA_TYPES}
    return {name: (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"') for name, content in contents.items()}


def page_file(name: str, request: Request) -> Response:
    """The answer to a request for the file `name`."""
    content, tag = page_files()[name]
    headers = {**HEADERS, "etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])
