"""Queries that a policy wrote, over a small SQLite database: they read, and end."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from typing import NamedTuple

MAX_RESULT_BYTES = 65_536
MAX_OPERATIONS = 5_000_000
"""Of SQLite's virtual machine, ahead of the clock: the same query ends in the same way on any machine."""
_OPERATIONS_PER_CHECK = 10_000

_FUNCTIONS = frozenset(
    (
        "abs",
        "avg",
        "cast",
        "coalesce",
        "count",
        "dense_rank",
        "first_value",
        "glob",
        "group_concat",
        "ifnull",
        "iif",
        "instr",
        "lag",
        "last_value",
        "lead",
        "length",
        "like",
        "lower",
        "ltrim",
        "max",
        "min",
        "nth_value",
        "ntile",
        "nullif",
        "rank",
        "replace",
        "round",
        "row_number",
        "rtrim",
        "sign",
        "substr",
        "substring",
        "sum",
        "total",
        "trim",
        "typeof",
        "upper",
    )
)
"""None that tells the time or draws at random."""
_READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 64,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 16,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 16,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class QueryRefused(ValueError):
    """Why there is no result, in words for the policy."""


class ResultSet(NamedTuple):
    """Of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]

    def text(self) -> str:
        """A header and a line a row."""
        return "\n".join(" | ".join(map(str, row)) for row in [self.columns, *self.rows])


def database(statements: Sequence[tuple[str, Sequence[tuple[object, ...]]]]) -> bytes:
    """A database as SQLite's file has it, from statements and the rows that each is executed with."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement, rows in statements:
            if rows:
                connection.executemany(statement, rows)
            else:
                connection.execute(statement)
        connection.commit()
        return connection.serialize()


def run_query(data: bytes, sql: str, *, max_rows: int, seconds: float) -> ResultSet:
    """One SELECT over a copy of the database.

    Nothing but reading and a list of functions is authorised, whatever the statement; a query is ended at its limit of
    operations, time, rows and bytes.

    Raises:
        QueryRefused: it is wrong, not allowed, or beyond a limit.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data)
        connection.execute("PRAGMA query_only = 1")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorized)
        checks, deadline = 0, time.monotonic() + seconds

        def ends() -> bool:
            nonlocal checks
            checks += 1
            return checks * _OPERATIONS_PER_CHECK >= MAX_OPERATIONS or time.monotonic() > deadline

        connection.set_progress_handler(ends, _OPERATIONS_PER_CHECK)
        try:
            return _fetched(connection.execute(sql), max_rows)
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            reason = f"took more than {seconds:g} s or too many steps" if "interrupted" in str(error) else str(error)
            raise QueryRefused(reason) from error


def _fetched(cursor: sqlite3.Cursor, max_rows: int) -> ResultSet:
    if cursor.description is None:
        raise QueryRefused("no SELECT")
    rows, num_bytes = [], 0
    for row in cursor:
        num_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        rows.append(row)
        if len(rows) > max_rows:
            raise QueryRefused(f"more than {max_rows} rows")
        if num_bytes > MAX_RESULT_BYTES:
            raise QueryRefused(f"a result of more than {MAX_RESULT_BYTES} bytes")
    return ResultSet(tuple(column[0] for column in cursor.description), rows)


def _authorized(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    del first
    if action in _READING or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
