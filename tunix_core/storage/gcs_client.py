"""Requests to Google Cloud Storage's JSON API over gcsfs's session and credentials, repeated and counted here.

gcsfs's own repetition is passed by: it does not try again after a time-out or some broken connections, begins with pauses
of a second, and does not say how many requests it sent.
"""

from __future__ import annotations

import asyncio
import base64
import http
import io
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import google.auth.exceptions
import google_crc32c
import requests
from fsspec.asyn import sync
from gcsfs.core import GCSFileSystem

from tunix_core.errors import StoreError
from tunix_core.storage.attempts import Backoff, Outcome, RequestCounts, Transient, status_fault, try_until_done

_REQUEST_SECONDS = 60.0
_CONNECT_SECONDS = 20.0
_SLOWEST_BYTES_PER_SECOND = 2**20
"""A request with a body may take longer by this."""
_BROKEN = (
    aiohttp.ClientError,
    TimeoutError,
    asyncio.IncompleteReadError,
    OSError,
    requests.RequestException,  # these two: a token could not be renewed
    google.auth.exceptions.GoogleAuthError,
)
_PASSED_ON: dict[int, Outcome] = {404: "missing", 410: "missing", 412: "refused", 416: "missing"}
"""What a status means that its caller handles."""


class Answer(NamedTuple):
    """Below 400, or one of 404, 410, 412 and 416."""

    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    content: bytes

    @property
    def found(self) -> bool:
        return self.status < 400

    def json(self) -> dict[str, Any]:
        """The object's or the listing's fields."""
        return json.loads(self.content) if self.content else {}


def connection_options() -> dict[str, Any]:
    """Of a gcsfs file system: nothing for Google, no credentials for the emulator of STORAGE_EMULATOR_HOST."""
    return {"token": "anon", "project": "emulated"} if os.environ.get("STORAGE_EMULATOR_HOST") else {}


def crc32c(data: bytes) -> str:
    """As Google writes it: base64 of the big-endian sum."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


class GcsClient:
    """Sends; one per store."""

    def __init__(self, uri: str, counts: RequestCounts, backoff: Backoff) -> None:
        self._uri = uri
        self._counts = counts
        self._backoff = backoff
        # the plain class: the extended one probes every bucket for hierarchical namespaces
        self._files = GCSFileSystem(use_listings_cache=False, skip_instance_cache=True, **connection_options())

    @property
    def host(self) -> str:
        """`https://…` or the emulator's."""
        return self._files._location

    def send(
        self,
        verb: str,
        method: str,
        path: str,
        *args: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        verify: bool = False,
        headers_after_fault: Mapping[str, str] | None = None,
        **parameters: Any,
    ) -> Answer:
        """One request, as often as it takes.

        Args:
            verb: under which it counts.
            path: below the JSON API's root, or a whole URL; `{}` stand for `args`.
            verify: whether the content is a whole object, whose checksum the headers say.
            headers_after_fault: of what is asked instead, without a body, once an attempt has failed.
            parameters: the query; None leaves one out.

        Raises:
            StoreError: it was denied, or failed for too long.
            CorruptObject: what came was never what its checksum says.
        """

        sent: tuple[Mapping[str, str] | None, bytes] = (headers, body)

        def attempt() -> Answer:
            nonlocal sent
            try:
                answer = sync(self._files.loop, self._exchange, method, path, args, *sent, parameters)
                self._check(answer, verify)
            except Transient as fault:
                self._counts.add(verb, fault.outcome)
                if headers_after_fault is not None:
                    sent = (headers_after_fault, b"")
                raise
            except StoreError:
                self._counts.add(verb, "denied")
                raise
            self._counts.add(verb, _PASSED_ON.get(answer.status, "ok"))
            return answer

        return try_until_done(attempt, self._backoff, what=f"{self._uri}: {method} {'/'.join(args[1:]) or path}")

    async def _exchange(
        self,
        method: str,
        path: str,
        args: tuple[str, ...],
        headers: Mapping[str, str] | None,
        body: bytes,
        parameters: dict[str, Any],
    ) -> Answer:
        files = self._files
        seconds = _REQUEST_SECONDS + len(body) / _SLOWEST_BYTES_PER_SECOND
        try:
            await files._set_session()
            async with files.session.request(
                method,
                files._format_path(path, args),
                params=files._get_params(parameters),
                headers=files._get_headers(headers),
                data=io.BytesIO(body) if body else None,  # anew for each attempt: aiohttp closes what it has sent
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS),
                allow_redirects=False,  # 308 says that a resumable upload goes on
            ) as answer:
                return Answer(answer.status, answer.headers, await answer.read())
        except _BROKEN as error:
            raise Transient("broken", f"{type(error).__name__}: {error}") from error

    def _check(self, answer: Answer, verify: bool) -> None:
        if answer.status >= 400 and answer.status not in _PASSED_ON:
            reason = f"{answer.status} {http.HTTPStatus(answer.status).phrase}: {_message(answer.content)}"
            fault = status_fault(answer.status, reason, retry_after=answer.headers.get("retry-after"))
            raise fault or StoreError(f"{self._uri}: {reason}")
        if verify and answer.found:
            sums = dict(part.strip().partition("=")[::2] for part in answer.headers.get("x-goog-hash", "").split(","))
            if (expected := sums.get("crc32c")) and expected != crc32c(answer.content):
                raise Transient(
                    "corrupt", f"received bytes whose crc32c is {crc32c(answer.content)}, accepted {expected}"
                )


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
