"""Google Cloud Storage: conditional writes by generation, checksums both ways, large objects in chunks.

A write is one multipart upload with `ifGenerationMatch` (0: create-only); the version is the object's generation. A
request is repeated, so "precondition failed" can mean that this call's own first attempt went through and its answer was
lost. Each object therefore carries its lineage in its metadata, the nonces of its last writes, and a refused writer looks
whether its own is among them. A compare-and-swap reads the lineage first, one request more.

Above `_SINGLE_REQUEST_BYTES` an upload is resumable: chunks, of which only the one that failed is sent again. The server
holds the condition and the checksum from the session's start to its end. fake-gcs-server holds neither (nor a condition
on anything but a multipart upload), so a race for an object of that size is exact at Google and unproven here; what the
project races for (pointers, claims, records, shards) is smaller.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from tunix_core.errors import ObjectExists, ObjectMissing, StoreError, VersionConflict
from tunix_core.storage.attempts import Backoff, Lineage, RequestCounts
from tunix_core.storage.gcs_client import Answer, GcsClient, crc32c
from tunix_core.storage.store import Version, check_key, check_prefix

_PAGE = 1000
_SINGLE_REQUEST_BYTES = 64 * 2**20
_CHUNK_BYTES = 16 * 2**20
"""A multiple of 256 KiB, as the protocol asks."""
_NUM_SESSIONS = 4
_ABSENT = {"ifGenerationMatch": "0"}
_WRITERS = "writers"
_REPLACED = "1"
"""The version of what this call wrote and others have replaced before it knew: no object's generation, nor 0."""
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class GcsStore:
    """`gs://bucket/prefix`; with STORAGE_EMULATOR_HOST set, that emulator instead of Google."""

    parallel_requests = 16

    def __init__(self, bucket: str, prefix: str, *, backoff: Backoff | None = None) -> None:
        self.uri = f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"
        self.counts = RequestCounts()
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = GcsClient(self.uri, self.counts, backoff or Backoff())

    # --- the four exact verbs ---

    def put_if_absent(self, key: str, data: bytes) -> Version:
        try:
            return self._write("put_if_absent", key, data, _ABSENT, Lineage().next())
        except VersionConflict:
            raise ObjectExists(f"{self.uri}: {key} exists") from None

    def get_with_version(self, key: str) -> tuple[bytes, Version]:
        return self._read("get_with_version", key)

    def put_if_version(self, key: str, data: bytes, version: Version) -> Version:
        verb = "put_if_version"
        found = self._metadata(verb, key)
        if found is None:
            raise ObjectMissing(f"{self.uri}: no object {key}")
        try:
            if str(found["generation"]) != version:
                raise VersionConflict(f"{self.uri}: {key} changed since version {version}")
            return self._write(verb, key, data, {"ifGenerationMatch": version}, _lineage(found).next())
        except VersionConflict:
            if self._metadata(verb, key) is None:
                raise ObjectMissing(f"{self.uri}: no object {key}") from None
            raise

    def list_after(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        start = self._prefix + after if after > prefix else None  # inclusive
        pages = self._pages("list_after", prefix=self._prefix + prefix, startOffset=start, fields="items(name)")
        cut = len(self._prefix)
        keys = [item["name"][cut:] for page in pages for item in page.get("items", ())]
        return sorted(key for key in keys if key > after and not key.endswith("/"))

    def list_folders(self) -> list[str]:
        """First components of the keys that have more than one; cheap however many keys there are."""
        pages = self._pages("list_folders", prefix=self._prefix, delimiter="/", fields="prefixes")
        cut = len(self._prefix)
        return sorted({found[cut:].rstrip("/") for page in pages for found in page.get("prefixes", ())})

    # --- the plain ones ---

    def get(self, key: str) -> bytes:
        return self._read("get", key)[0]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:  # HTTP knows no empty range
            if self._metadata("get_range", key) is None:
                raise ObjectMissing(f"{self.uri}: no object {key}")
            return b""
        answer = self._download("get_range", key, headers={"Range": f"bytes={start}-{stop - 1}"})
        return b"" if answer.status == 416 else answer.content  # 416: it ends before `start`

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data, {}, Lineage().next())

    def exists(self, key: str) -> bool:
        return self._metadata("exists", key) is not None

    def delete(self, key: str) -> None:
        self._client.send("delete", "DELETE", "b/{}/o/{}", self._bucket, self._full(key))

    # --- how ---

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _metadata(self, verb: str, key: str) -> dict[str, Any] | None:
        answer = self._client.send(verb, "GET", "b/{}/o/{}", self._bucket, self._full(key))
        return answer.json() if answer.found else None

    def _pages(self, verb: str, *, fields: str, **parameters: Any) -> list[dict[str, Any]]:
        parameters |= {"maxResults": _PAGE, "fields": f"{fields},nextPageToken"}
        pages: list[dict[str, Any]] = []
        token: str | None = None
        while True:
            answer = self._client.send(verb, "GET", "b/{}/o", self._bucket, pageToken=token, **parameters)
            if not answer.found:
                raise StoreError(f"{self.uri}: no bucket {self._bucket}")
            pages.append(answer.json())
            token = pages[-1].get("nextPageToken")
            if not token:
                return pages

    def _download(self, verb: str, key: str, **options: Any) -> Answer:
        url = f"{self._client.host}/download/storage/v1/b/{{}}/o/{{}}"
        answer = self._client.send(verb, "GET", url, self._bucket, self._full(key), alt="media", **options)
        if answer.status == 404:
            raise ObjectMissing(f"{self.uri}: no object {key}")
        return answer

    def _read(self, verb: str, key: str) -> tuple[bytes, Version]:
        answer = self._download(verb, key, verify=True)
        return answer.content, str(answer.headers["x-goog-generation"])

    def _write(self, verb: str, key: str, data: bytes, condition: dict[str, Any], lineage: Lineage) -> Version:
        fields = {"name": self._full(key), "metadata": {_WRITERS: str(lineage)}, "crc32c": crc32c(data)}
        if len(data) > _SINGLE_REQUEST_BYTES:
            return self._write_in_chunks(verb, key, data, fields, condition)
        boundary = uuid.uuid4().hex
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(fields)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        answer = self._client.send(
            verb,
            "POST",
            f"{self._client.host}/upload/storage/v1/b/{{}}/o",
            self._bucket,
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            body=head + data + f"\r\n--{boundary}--\r\n".encode(),
            **condition,
        )
        if answer.found:
            return self._checked(key, answer.json(), fields)
        if answer.status == 412:
            return self._own(verb, key, fields)
        raise StoreError(f"{self.uri}: no bucket {self._bucket}")

    def _own(self, verb: str, key: str, fields: dict[str, Any]) -> Version:
        """The version that this very write has put there, which was refused or whose answer is lost."""
        found = self._metadata(verb, key)
        if found is None or not _lineage(found).includes(_lineage(fields)):
            raise VersionConflict(f"{self.uri}: {key} changed")
        if _lineage(found) != _lineage(fields):
            return _REPLACED
        return self._checked(key, found, fields)

    def _checked(self, key: str, found: dict[str, Any], fields: dict[str, Any]) -> Version:
        # Google refuses the write itself where the declared sum is not that of what arrived
        if found["crc32c"] != fields["crc32c"]:
            raise _Garbled(f"{self.uri}: {key} was stored with crc32c {found['crc32c']}, accepted {fields['crc32c']}")
        return str(found["generation"])

    # --- in chunks ---

    def _write_in_chunks(
        self, verb: str, key: str, data: bytes, fields: dict[str, Any], condition: dict[str, Any]
    ) -> Version:
        if condition == _ABSENT and self._metadata(verb, key) is not None:  # before all of it is sent
            raise VersionConflict(f"{self.uri}: {key} exists")
        for _ in range(_NUM_SESSIONS):
            try:
                answer = self._session(verb, data, fields, condition)
                if answer.found:
                    return self._checked(key, answer.json(), fields)
                return self._own(verb, key, fields)
            except _Garbled:  # only an emulator stores what it was told not to
                self.delete(key)
            except VersionConflict:
                if answer.status == 412:
                    raise
        raise StoreError(f"{self.uri}: {key}: {_NUM_SESSIONS} upload sessions ended early")

    def _session(self, verb: str, data: bytes, fields: dict[str, Any], condition: dict[str, Any]) -> Answer:
        """One upload; the answer is the object's, 412, or 404 or 410: the session is no more."""
        answer = self._client.send(
            verb,
            "POST",
            f"{self._client.host}/upload/storage/v1/b/{{}}/o",
            self._bucket,
            uploadType="resumable",
            headers={"Content-Type": "application/json; charset=UTF-8", "X-Upload-Content-Length": str(len(data))},
            body=json.dumps(fields).encode(),
            name=fields["name"],
            **condition,
        )
        if not answer.found:
            return answer
        url = answer.headers["location"]
        begin = 0
        while True:
            chunk = data[begin : begin + _CHUNK_BYTES]
            headers = {"Content-Range": f"bytes {begin}-{begin + len(chunk) - 1}/{len(data)}"}
            status = {"Content-Range": f"bytes */{len(data)}"}  # asks how much has arrived
            answer = self._client.send(verb, "PUT", url, headers=headers, body=chunk, headers_after_fault=status)
            if answer.status != 308:
                return answer
            # it may have kept less than was sent
            received = _RECEIVED.fullmatch(answer.headers.get("range", ""))
            begin = int(received[1]) + 1 if received else 0


def _lineage(fields: dict[str, Any]) -> Lineage:
    return Lineage.parse(fields.get("metadata", {}).get(_WRITERS))


class _Garbled(StoreError):
    """What was stored is not what was sent."""
