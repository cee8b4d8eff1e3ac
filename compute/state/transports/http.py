"""The way to a node that serves its states over HTTP. A transfer that breaks is resumed where it broke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from megloom.compute.state.errors import ConflictingState, StateFull, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.transports.http_server import CHUNK_BYTES, append
from megloom.compute.store.offload import Offload

log = logging.getLogger(__name__)

CONNECT_S = 10.0
_MAX_SAID = 1000  # characters of an answer in an error: two digests and a path fit
SILENCE_S = 30.0  # a live node sends something within this, or the transfer is broken
_DIGEST_BYTES_PER_S = 200e6  # at the least: the other side may compare a digest before it answers
MAX_BREAKS = 4  # in a row without a new byte: then the node counts as lost


class HttpTransport:
    """A `Transport` to the service at `base_url` (see `http_server`). `offload` writes what arrives."""

    name = "http"
    is_cache = False

    def __init__(self, base_url: str, *, token: str, offload: Offload, pause_s: float = 0.2) -> None:
        self._base, self._offload, self._pause_s = base_url.rstrip("/"), offload, pause_s
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def describe(self, key: Key) -> Entry | None:
        async with self._request("GET", f"entries/{key}") as response:
            if response.status == 404:
                return None
            await self._require(response, 200)
            values = await response.json()
        return Entry(key=key, digest=str(values["digest"]), size_bytes=int(values["size_bytes"]))

    async def fetch(self, entry: Entry, path: Path) -> None:
        await self._offload.run(path.touch)
        num_bytes, num_breaks = 0, 0
        while num_bytes < entry.size_bytes:
            before = num_bytes
            try:
                num_bytes = await self._fetch_from(entry, path, num_bytes)
                cause: Exception | str = "it ended early"
            except _Refused:
                raise
            except TransportError as error:
                cause = error
                num_bytes = (await self._offload.run(path.stat)).st_size
            if num_bytes >= entry.size_bytes:
                return
            num_breaks = 1 if num_bytes > before else num_breaks + 1
            if num_breaks >= MAX_BREAKS:
                raise TransportError(
                    f"{self._base}: {entry.key} broke off at byte {num_bytes} of {entry.size_bytes}"
                    f" {num_breaks} times: {cause}"
                )
            log.warning("key=%s url=%s: resumed at byte %d: %s", entry.key, self._base, num_bytes, cause)
            await asyncio.sleep(self._pause_s * num_breaks)

    async def push(self, entry: Entry, path: Path) -> None:
        with path.open("rb") as file:
            url = f"objects/{entry.key}?digest={entry.digest}"
            async with self._request("PUT", url, data=file, size_bytes=entry.size_bytes) as response:
                await self._require(response, 201)

    async def drop(self, key: Key) -> None:
        """Does nothing: another node's files are its own to delete."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fetch_from(self, entry: Entry, path: Path, offset: int) -> int:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with self._request(
            "GET",
            f"objects/{entry.key}?digest={entry.digest}",
            headers=headers,
            size_bytes=entry.size_bytes,
        ) as response:
            await self._require(response, 206 if offset else 200)
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                await self._offload.run(append, path, chunk)
                offset += len(chunk)
        return offset

    async def _require(self, response: aiohttp.ClientResponse, status: int) -> None:
        if response.status == status:
            return
        text = (await response.text())[:_MAX_SAID]
        said = f"{self._base}: status {response.status}, expected {status}: {text}"
        if response.status == 507:
            raise StateFull(said)
        if response.status == 409 and response.method == "PUT":
            raise ConflictingState(said)
        raise _Refused(said)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        data: object = None,
        headers: dict[str, str] | None = None,
        size_bytes: int = 0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        silence_s = SILENCE_S + size_bytes / _DIGEST_BYTES_PER_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        try:
            async with self._session.request(
                method,
                f"{self._base}/v1/{path}",
                data=data,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransportError(f"{self._base}: {method} {path}: {error or type(error).__name__}") from error


class _Refused(TransportError):
    """The node answered, and no retry will change its answer."""
