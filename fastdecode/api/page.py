"""The page at /: a chat and a view of the cluster, from files that ship with the package and name no other host."""

from __future__ import annotations

import hashlib
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_INDEX = "index.html"
_HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks each time, and gets a 304 while the file is the same
    # The page loads nothing from elsewhere, makes no element from a string, and no other page may frame it (Content
    # Security Policy Level 3, Trusted Types).
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[web.RouteDef]:
    """A route for each file of the page; the path of index.html is /."""
    return [_route(path) for path in sorted(_FOLDER.rglob("*.*"))]


def is_page(path: str) -> bool:
    """Whether a file of the page has this path. They hold nothing secret, and a browser sends no API key for them."""
    return path == "/" or path.startswith("/static/")


def _route(path: Path) -> web.RouteDef:
    body = path.read_bytes()
    etag = hashlib.sha256(body).hexdigest()[:16]

    async def send(request: web.Request) -> web.Response:
        if any(known.value == etag for known in request.if_none_match or ()):
            response = web.Response(status=304, headers=_HEADERS)
        else:
            response = web.Response(body=body, content_type=_TYPES[path.suffix], charset="utf-8", headers=_HEADERS)
        response.etag = etag
        return response

    name = path.relative_to(_FOLDER).as_posix()
    return web.get("/" if name == _INDEX else f"/static/{name}", send)
