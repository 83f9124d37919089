"""Google Cloud Storage through gcsfs, one JSON-API request per verb.

Conditional writes are multipart uploads with `ifGenerationMatch` (0: create-only); the version is the
object's generation. gcsfs retries a request by itself, so "precondition failed" can mean that this
call's own first attempt went through and its answer was lost. Each upload therefore carries a
nonce in the object's metadata, and a refused writer looks whose nonce the object has.

One gap is left: where the own first attempt won and another writer replaced the object before the
nonce was read, a compare-and-swap reports a conflict although it took effect for a moment.
"""

from __future__ import annotations

import io
import json
import os
import random
import time
import uuid
from typing import Any

import aiohttp
import requests
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError, is_retriable

from tunix_core.errors import ObjectExists, ObjectMissing, StoreError, VersionConflict
from tunix_core.storage.store import Version, check_key, check_prefix

_REQUEST_SECONDS = 120
_NUM_ATTEMPTS = 3
"""On top of gcsfs's own six, for what those do not cover (time-outs, dropped connections)."""
_PAGE = 1000
_FAILURES = (OSError, HttpError, requests.RequestException, aiohttp.ClientError, TimeoutError, ValueError)


class _Body(io.BytesIO):
    """A request's body (aiohttp sends bytes above 1 MiB only with a warning); where it closes
    what it has sent, a retry still needs it open."""

    def close(self) -> None:
        self.seek(0)


def connection_options() -> dict[str, Any]:
    """Of a gcsfs file system: nothing for Google, no credentials for the emulator of STORAGE_EMULATOR_HOST."""
    return {"token": "anon", "project": "emulated"} if os.environ.get("STORAGE_EMULATOR_HOST") else {}


class GcsStore:
    """`gs://bucket/prefix`; with STORAGE_EMULATOR_HOST set, that emulator instead of Google."""

    parallel_requests = 16

    def __init__(self, bucket: str, prefix: str) -> None:
        self.uri = f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        # the plain class: the extended one probes every bucket for hierarchical namespaces
        self._files = GCSFileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            requests_timeout=_REQUEST_SECONDS,
            **connection_options(),
        )

    # --- the four exact verbs ---

    def put_if_absent(self, key: str, data: bytes) -> Version:
        try:
            return self._upload(key, data, generation=0)
        except VersionConflict:
            raise ObjectExists(f"{self.uri}: {key} exists") from None

    def get_with_version(self, key: str) -> tuple[bytes, Version]:
        url = f"{self._files._location}/download/storage/v1/b/{{}}/o/{{}}"
        headers, content = self._call(key, "GET", url, self._bucket, self._full(key), alt="media")
        return content, str(headers["x-goog-generation"])  # case-insensitive mapping

    def put_if_version(self, key: str, data: bytes, version: Version) -> Version:
        try:
            return self._upload(key, data, generation=int(version))
        except VersionConflict:
            if not self.exists(key):
                raise ObjectMissing(f"{self.uri}: no object {key}") from None
            raise

    def list_after(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        cut = len(self._prefix)
        keys: list[str] = []
        token: str | None = None
        while True:
            page = self._call(
                prefix,
                "GET",
                "b/{}/o",
                self._bucket,
                prefix=self._prefix + prefix,
                startOffset=self._prefix + after if after > prefix else None,  # inclusive
                maxResults=_PAGE,
                pageToken=token,
                fields="items(name),nextPageToken",
                json_out=True,
            )
            keys.extend(item["name"][cut:] for item in page.get("items", ()))
            token = page.get("nextPageToken")
            if not token:
                return sorted(key for key in keys if key > after and not key.endswith("/"))

    def list_folders(self) -> list[str]:
        """First components of the keys that have more than one; cheap however many keys there are."""
        names: set[str] = set()
        token: str | None = None
        while True:
            page = self._call(
                "",
                "GET",
                "b/{}/o",
                self._bucket,
                prefix=self._prefix,
                delimiter="/",
                maxResults=_PAGE,
                pageToken=token,
                fields="prefixes,nextPageToken",
                json_out=True,
            )
            names.update(p[len(self._prefix) :].rstrip("/") for p in page.get("prefixes", ()))
            token = page.get("nextPageToken")
            if not token:
                return sorted(names)

    # --- the plain ones ---

    def get(self, key: str) -> bytes:
        return self.get_with_version(key)[0]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:  # HTTP knows no empty range
            return b"" if self.exists(key) else self.get(key)
        url = f"{self._files._location}/download/storage/v1/b/{{}}/o/{{}}"
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            _, content = self._call(key, "GET", url, self._bucket, self._full(key), alt="media", headers=wanted)
        except StoreError as error:
            if getattr(error.__cause__, "code", None) == 416:  # it ends before `start`
                return b""
            raise
        return bytes(content)

    def put(self, key: str, data: bytes) -> None:
        self._upload(key, data, generation=None)

    def exists(self, key: str) -> bool:
        return self._metadata(key) is not None

    def delete(self, key: str) -> None:
        try:
            self._call(key, "DELETE", "b/{}/o/{}", self._bucket, self._full(key))
        except ObjectMissing:
            return

    # --- how ---

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _metadata(self, key: str) -> dict[str, Any] | None:
        try:
            return self._call(key, "GET", "b/{}/o/{}", self._bucket, self._full(key), json_out=True)
        except ObjectMissing:
            return None

    def _upload(self, key: str, data: bytes, *, generation: int | None) -> Version:
        nonce = uuid.uuid4().hex
        head = json.dumps({"name": self._full(key), "metadata": {"writer": nonce}})
        body = (
            f"--{nonce}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{head}\r\n"
            f"--{nonce}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        condition = {} if generation is None else {"ifGenerationMatch": str(generation)}
        try:
            answer = self._call(
                key,
                "POST",
                f"{self._files._location}/upload/storage/v1/b/{{}}/o",
                self._bucket,
                uploadType="multipart",
                headers={"Content-Type": f'multipart/related; boundary="{nonce}"'},
                data=_Body(body + data + f"\r\n--{nonce}--\r\n".encode()),
                json_out=True,
                **condition,
            )
        except FileExistsError:
            found = self._metadata(key)
            if found is not None and found.get("metadata", {}).get("writer") == nonce:
                return str(found["generation"])
            raise VersionConflict(f"{self.uri}: {key} changed since version {generation}") from None
        return str(answer["generation"])

    def _call(self, key: str, method: str, path: str, *args: str, **options: Any) -> Any:
        """One request. FileExistsError is let through: it is how gcsfs says "precondition failed"."""
        for attempt in range(_NUM_ATTEMPTS):
            try:
                return self._files.call(method, path, *args, **options)
            except FileExistsError:
                raise
            except FileNotFoundError:
                raise ObjectMissing(f"{self.uri}: no object {key}") from None
            except _FAILURES as error:
                # gcsfs has already retried what it calls retriable, with backoff up to half a minute
                again = isinstance(error, TimeoutError | ConnectionError) and not is_retriable(error)
                if not again or attempt == _NUM_ATTEMPTS - 1:
                    raise StoreError(f"{self.uri}: {method} {key}: {type(error).__name__}: {error}") from error
                time.sleep(random.uniform(0.5, 1.0) * 2**attempt)
        raise AssertionError("unreachable")
