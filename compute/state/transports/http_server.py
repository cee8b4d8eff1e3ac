"""Serves a node's states to other nodes and to its own other processes. A bearer token guards every route.

    GET  /v1/entries/{run}/{policy}/{kind}/{version}    {"digest", "size_bytes"}
    GET  /v1/objects/{...}?digest=…                     the bytes; ranges are honoured; 409 for other content
    PUT  /v1/objects/{...}?digest=…                     stores the body: 201, 409 for other content, 507 full

Deny by default: the token is compared, in constant time, before any routing. Names are checked as `Key`s, so
no path leads outside. Answers come from this node's own files only: nodes never ask each other in circles.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler, Middleware

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import DISK_FULL, ConflictingState, StateError, StateFull
from megloom.compute.state.keys import Key
from megloom.compute.state.store import StateStore
from megloom.compute.store.offload import Offload

CHUNK_BYTES = 4 << 20


def build_app(store: StateStore, bulk: Offload, *, token: str) -> web.Application:
    """The application; `bulk` writes what is uploaded.

    Raises: ValueError for an empty token.
    """
    if not token:
        raise ValueError("state service: an empty token, expected a secret")
    routes = _Routes(store, bulk)
    app = web.Application(middlewares=[_guard(token), _errors])
    app.router.add_get("/v1/entries/{key:.+}", routes.entry)
    app.router.add_get("/v1/objects/{key:.+}", routes.download)
    app.router.add_put("/v1/objects/{key:.+}", routes.upload)
    return app


@asynccontextmanager
async def serving(
    store: StateStore, bulk: Offload, *, token: str, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serves until the block ends; gives the base URL. Port 0 takes a free one."""
    runner = web.AppRunner(build_app(store, bulk, token=token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()


class _Routes:
    def __init__(self, store: StateStore, bulk: Offload) -> None:
        self._store, self._bulk = store, bulk

    async def entry(self, request: web.Request) -> web.StreamResponse:
        entry = await self._store.local_entry(_key_of(request))
        if entry is None:
            raise FileNotFoundError(f"no state {request.match_info['key']}")
        return web.json_response({"digest": entry.digest, "size_bytes": entry.size_bytes})

    async def download(self, request: web.Request) -> web.StreamResponse:
        key, wanted = _key_of(request), request.query.get("digest")
        async with self._store.reading(key) as copy:
            if wanted not in (None, copy.entry.digest):
                raise ConflictingState(f"state {key} has digest {copy.entry.digest}, asked for {wanted}")
            return _KeptFile(self._store, key, copy.path)

    async def upload(self, request: web.Request) -> web.StreamResponse:
        key, digest, size_bytes = _key_of(request), request.query.get("digest", ""), request.content_length
        if size_bytes is None or not digest:
            raise ValueError("an upload needs Content-Length and ?digest=")
        draft = await self._store.draft(size_bytes)
        try:
            await self._bulk.run(draft.path.touch)
            async for chunk in request.content.iter_chunked(CHUNK_BYTES):
                await self._bulk.run(append, draft.path, chunk)
            got = await self._bulk.run(file_digest, draft.path)
            if got != digest:
                raise ValueError(f"state {key}: the body has digest {got}, expected {digest}")
            entry = await self._store.put(key, draft, digest=got)
        finally:
            await self._store.discard(draft)
        return web.json_response({"digest": entry.digest, "size_bytes": entry.size_bytes}, status=201)


class _KeptFile(web.FileResponse):
    """A file that the store does not move while it is sent."""

    def __init__(self, store: StateStore, key: Key, path: Path) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        super().__init__(path, chunk_size=CHUNK_BYTES, headers=headers)
        self._store, self._key = store, key

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        async with self._store.reading(self._key):
            return await super().prepare(request)


def append(path: Path, data: bytes) -> None:
    """Adds bytes to a file's end."""
    with path.open("ab", buffering=0) as file:
        view = memoryview(data)
        while len(view):
            view = view[file.write(view) or 0 :]


def _key_of(request: web.Request) -> Key:
    return Key.parse(request.match_info["key"])


def _guard(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, expected):
            return web.json_response({"error": "a valid bearer token is needed"}, status=401)
        return await handler(request)

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except FileNotFoundError as error:
        return web.json_response({"error": str(error)}, status=404)
    except ValueError as error:
        return web.json_response({"error": str(error)}, status=400)
    except ConflictingState as error:
        return web.json_response({"error": str(error)}, status=409)
    except StateFull as error:
        return web.json_response({"error": str(error)}, status=507)
    except StateError as error:
        return web.json_response({"error": str(error)}, status=500)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return web.json_response({"error": f"disk full: {error}"}, status=507)
