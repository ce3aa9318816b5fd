"""The body of a request as it was before its Content-Encoding."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from fastdecode.api.errors import ApiError

#: A body may take this many seconds, and a second more for each of these bytes.
_BODY_SECONDS, _BODY_RATE = 10.0, 1024
_CODINGS = ("gzip", "x-gzip", "deflate")


async def read_bytes(request: web.Request) -> bytes:
    """The body, decompressed (RFC 9110, 8.4.1). aiohttp leaves that to this function (server.py), because its own
    answer to a coding that it does not know is no JSON. Raises ApiError (400, 408, 415), HTTPRequestEntityTooLarge."""
    raw = await _read(request)
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding == "identity":
        return raw
    if coding not in _CODINGS:
        message = f"Content-Encoding {coding!r} is not known here; send the body as it is, or in gzip or deflate"
        headers = {"Accept-Encoding": "gzip, deflate"}
        raise ApiError(415, message, code="unsupported_encoding", headers=headers)
    return _decompressed(raw, coding, request.client_max_size)


async def _read(request: web.Request) -> bytes:
    """The body as it was sent. Raises as `read_bytes` does."""
    body, most = bytearray(), request.client_max_size
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        while True:
            async with asyncio.timeout_at(begin + _BODY_SECONDS + len(body) / _BODY_RATE):
                part = await request.content.readany()
            if not part:
                return bytes(body)
            body += part
            if len(body) > most:
                raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {' '.join(str(error).split())}", code="invalid_body") from None
    except TimeoutError:
        message = f"the body arrives too slowly: {len(body)} bytes in {loop.time() - begin:.0f} s"
        raise ApiError(408, message, code="slow_body", headers={"Connection": "close"}) from None


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
