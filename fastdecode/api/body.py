"""The body of a request as it was before its Content-Encoding."""

from __future__ import annotations

import zlib

from aiohttp import web

from fastdecode.api.errors import ApiError

_CODINGS = ("gzip", "x-gzip", "deflate")


async def read_bytes(request: web.Request) -> bytes:
    """The body, decompressed (RFC 9110, 8.4.1). aiohttp leaves that to this function (server.py), because its own
    answer to a coding that it does not know is no JSON. Raises ApiError (400, 415), HTTPRequestEntityTooLarge."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {' '.join(str(error).split())}", code="invalid_body") from None
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding == "identity":
        return raw
    if coding not in _CODINGS:
        message = f"Content-Encoding {coding} is not known here; send the body as it is, or in gzip or deflate"
        headers = {"Accept-Encoding": "gzip, deflate"}
        raise ApiError(415, message, code="unsupported_encoding", headers=headers)
    return _decompressed(raw, coding, request.client_max_size)


def _decompressed(raw: bytes, coding: str, most: int) -> bytes:
    window = zlib.MAX_WBITS + 16 if coding != "deflate" else zlib.MAX_WBITS
    if coding == "deflate" and raw[:1] and raw[0] & 15 != 8:  # some clients send deflate without zlib's header
        window = -zlib.MAX_WBITS
    decompressor = zlib.decompressobj(window)
    try:
        body = decompressor.decompress(raw, most + 1)
    except zlib.error:
        body = b""
    if len(body) > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
    if not decompressor.eof:
        raise ApiError(400, f"the body is not in {coding}, or is cut off", code="invalid_body")
    return body
