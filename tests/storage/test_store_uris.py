from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunix_core.errors import ConfigError
from tunix_core.storage.store import check_under_roots, join_uri, map_requests, normalize_uri, open_store


def test_local_uris_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = f"file://{tmp_path}/runs/one"
    assert normalize_uri("runs/one") == expected
    assert normalize_uri(f"{tmp_path}/runs/../runs/one/") == expected
    assert normalize_uri(f"file://{tmp_path}/runs/one/") == expected
    assert normalize_uri(normalize_uri("a%20b")) == f"file://{tmp_path}/a%20b"


def test_other_uris() -> None:
    assert normalize_uri("gs://bucket/a/b/") == "gs://bucket/a/b"
    assert normalize_uri("gs://bucket/") == "gs://bucket"
    assert normalize_uri("memory://x/y/") == "memory://x/y"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "s3://bucket/run",
        "http://x",
        "gcs://b/x",
        "file://relative",
        "gs://",
        "gs://B/x",
        "gs://b/x",
        "gs://bucket/../x",
        "gs://bucket//x",
        "memory://",
        "memory://a/../b",
        "a\0b",
        "gs://bucket/.tmp",
        None,
        3,
    ],
)
def test_refused_uris(uri: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        open_store(uri)


def test_s3_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="'s3' has no exact conditional writes here"):
        open_store("s3://bucket/run")


def test_roots(tmp_path: Path) -> None:
    roots = [str(tmp_path / "runs"), "gs://bucket/team"]
    assert check_under_roots(f"{tmp_path}/runs/one", roots) == f"file://{tmp_path}/runs/one"
    assert check_under_roots("gs://bucket/team/run", roots) == "gs://bucket/team/run"
    assert check_under_roots("gs://bucket/team", roots) == "gs://bucket/team"
    for outside in (f"{tmp_path}/runs/../other", f"{tmp_path}/runs2", "gs://bucket/team2/run", "gs://bucket2/team/x"):
        with pytest.raises(ConfigError, match="under one of"):
            check_under_roots(outside, roots)
    with pytest.raises(ConfigError, match="no roots"):
        open_store(str(tmp_path), roots=[])


def test_a_link_leads_out_of_no_root(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "runs" / "link")
    with pytest.raises(ConfigError):
        check_under_roots(f"{tmp_path}/runs/link/x", [f"{tmp_path}/runs"])


def test_join_uri() -> None:
    assert join_uri("gs://bucket/team/", "run") == "gs://bucket/team/run"
    with pytest.raises(ConfigError):
        join_uri("gs://bucket", "../x")


def test_map_requests_keeps_order_and_raises() -> None:
    store = open_store("memory://map")
    assert map_requests(store, lambda x: x * 2, range(5)) == [0, 2, 4, 6, 8]
    with pytest.raises(ZeroDivisionError):
        map_requests(store, lambda x: 1 / x, [1, 0])
