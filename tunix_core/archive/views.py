"""SQL over a run: DuckDB views of its Parquet files and step records, where they lie.

`trajectories` reads only the columns that a query names. `consumed` tells which step took which row, and
how old it was then. Shards in quarantine are left out, as the learner left them out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tunix_core import paths
from tunix_core.errors import ConfigError
from tunix_core.storage.quarantine import read_quarantine
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.shard_schema import SCHEMA
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore
from tunix_core.validation import require_package

CONSUMED = pa.schema(
    [
        pa.field("shard", pa.string()),
        pa.field("row", pa.int64()),
        pa.field("clock", pa.int64()),
        pa.field("advantage", pa.float64()),
    ]
)
"""Columns of the redo log as a table; `clock` is the clock after the step."""

_TURNS = """
create view turns as
select trajectory_id, episode_id, group_id, environment, policy_version_min, number, turn.*
from (select *, unnest(turns) as turn, generate_subscripts(turns, 1) - 1 as number from trajectories)
"""

_SHARD = r"regexp_extract(filename, 'trajectories/date=[^/]*/hour=[^/]*/[^/]*$')"
"""A file's key within the run, however its store is named."""

_AGES = """
create view consumed as
select log.clock, log.clock - 1 - t.policy_version_min as staleness, log.advantage, t.*
from redo_log as log join trajectories as t on t.shard = log.shard and t.row = log.row
"""


def connect(store: ObjectStore) -> Any:
    """A DuckDB connection with the views `trajectories`, `turns`, `consumed`, `evaluations`, `metrics_<process>` of a run.

    Raises:
        ConfigError: DuckDB is not installed.
    """
    require_package("duckdb", "sql")
    import duckdb

    connection = duckdb.connect()
    root = _root(store, connection)
    _trajectories(store, connection, root)
    connection.register("redo_log", redo_log(store))
    connection.execute(_TURNS)
    connection.execute(_AGES)
    _files(store, connection, root, "evaluations", paths.EVALUATIONS)
    for process in sorted({key.split("/")[1] for key in store.list_after(paths.METRICS)}):
        _files(store, connection, root, "metrics_" + process.replace("-", "_"), f"{paths.METRICS}{process}/")
    return connection


def parquet_files(store: ObjectStore) -> list[str]:
    """The Parquet files that hold every trajectory of a run once, by URI; those of compacted hours have two columns more, and
    come last."""
    sources, files = ShardArchive(store).objects()
    return [f"{store.uri}/{key}".removeprefix("file://") for key in (*sources, *files)]


def query(store: ObjectStore, sql: str) -> pa.Table:
    """The answer to one SQL statement over the views.

    Raises:
        ConfigError: the statement is no valid SQL, or names what is not there.
    """
    connection = connect(store)
    import duckdb

    try:
        answer = connection.sql(sql)
        if answer is None:
            raise ConfigError("sql", sql, "one statement that answers something", "Write a select.")
        return answer.to_arrow_table()
    except duckdb.Error as error:
        raise ConfigError("sql", sql, "one statement over the views", f"{error}.") from error


def redo_log(store: ObjectStore) -> pa.Table:
    """The step records as rows, see `CONSUMED`; of turn-level advantages the mean."""
    columns: dict[str, list[Any]] = {name: [] for name in CONSUMED.names}
    for record in read_steps(store, 0):
        for group in record["groups"]:
            num = len(group["rows"])
            columns["shard"] += [group["shard"]] * num
            columns["row"] += group["rows"]
            columns["clock"] += [record["clock"]] * num
            columns["advantage"] += [float(np.mean(value)) for value in group["advantages"]]
    return pa.table(columns, schema=CONSUMED)


def _root(store: ObjectStore, connection: Any) -> str:
    """What DuckDB puts before a key. Other stores than folders are read through their fsspec file system."""
    if store.uri.startswith("gs://"):
        import fsspec

        from tunix_core.storage.gcs_client import connection_options

        connection.register_filesystem(fsspec.filesystem("gcs", **connection_options()))
        return store.uri.replace("gs://", "gcs://", 1) + "/"
    if store.uri.startswith("memory://"):
        raise ConfigError("--run", store.uri, "a folder or gs://", "A store in memory is only its process's.")
    return store.uri.removeprefix("file://") + "/"


def _trajectories(store: ObjectStore, connection: Any, root: str) -> None:
    entries = read_quarantine(store)
    refused = {entry.shard for entry in entries if entry.reason}
    rows = {(entry.shard, row) for entry in entries for row in entry.rows}
    sources, files = ShardArchive(store).objects()
    keys = [key for key in sources if key not in refused]
    if not keys and not files:
        connection.register("no_trajectories", SCHEMA.empty_table())
        connection.execute("create view trajectories as select *, '' as shard, 0 as row from no_trajectories")
        return
    faulty = pa.table(
        {"shard": [shard for shard, _ in rows], "row": [row for _, row in rows]}, schema=CONSUMED.remove(3).remove(2)
    )
    connection.register("refused_rows", faulty)
    selects = []
    if keys:
        selects.append(
            f"""select * exclude (filename, file_row_number), {_SHARD} as shard, file_row_number as row
            from read_parquet({_texts(root + key for key in keys)}, filename = true, file_row_number = true,
                              hive_partitioning = true)"""
        )
    if files:  # of several shards each; their rows say where they came from
        selects.append(f"select * from read_parquet({_texts(root + key for key in files)}, hive_partitioning = true)")
    # Without refused rows no query has to work out which shard a row is of.
    without = "anti join refused_rows as r on r.shard = t.shard and r.row = t.row" if rows else ""
    connection.execute(
        f"create view trajectories as select * from ({' union all by name '.join(selects)}) as t {without}"
    )


def _files(store: ObjectStore, connection: Any, root: str, view: str, prefix: str) -> None:
    keys = [key for key in store.list_after(prefix) if key.endswith(".parquet")]
    if keys:
        files = _texts(root + key for key in keys)
        connection.execute(f'create view "{view}" as select * from read_parquet({files}, union_by_name = true)')


def _texts(values: Any) -> str:
    return "[" + ", ".join("'" + value.replace("'", "''") + "'" for value in values) + "]"
