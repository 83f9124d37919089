import sqlite3
import time

import pytest

from tests.environments.support import made, play
from tunix_core.environment_config import SqlOptions
from tunix_core.environments import task_seed
from tunix_core.environments.sql import QUESTIONS
from tunix_core.environments.sqlite_queries import QueryRefused, database, run_query

DATA = database(
    [
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)", ()),
        ("INSERT INTO t VALUES (?, ?)", [(i, f"n{i}") for i in range(30)]),
    ]
)


def rows(sql: str, max_rows: int = 50, seconds: float = 20.0) -> list:
    return run_query(DATA, sql, max_rows=max_rows, seconds=seconds).rows


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT COUNT(*) FROM t", [(30,)]),
        ("select upper(name) from t where id = 3;", [("N3",)]),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 3) SELECT x FROM c",
            [(1,), (2,), (3,)],
        ),
        ("SELECT id, RANK() OVER (ORDER BY id DESC) FROM t LIMIT 1", [(29, 1)]),
        ("SELECT name FROM sqlite_master", [("t",)]),
        ("SELECT x'ff'", [(b"\xff",)]),
    ],
)
def test_queries_that_read(sql: str, wanted: list) -> None:
    assert rows(sql) == wanted


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM t",
        "INSERT INTO t VALUES (99, 'x')",
        "UPDATE t SET name = ''",
        "DROP TABLE t",
        "CREATE TABLE u (x)",
        "CREATE TEMP TABLE u (x)",
        "WITH x AS (SELECT 1) DELETE FROM t",
        "ATTACH '/tmp/other.db' AS other",
        "PRAGMA query_only = 0",
        "SELECT * FROM pragma_table_info('t')",
        "VACUUM INTO '/tmp/copy.db'",
        "BEGIN",
        "ANALYZE",
        "SELECT load_extension('/tmp/x')",
        "SELECT randomblob(8)",
        "SELECT random()",
        "SELECT date('now')",
        "SELECT CURRENT_TIMESTAMP",
        "SELECT zeroblob(2000000000)",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "SELECT replace(hex(zeroblob(9000)), '00', 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxx')",
        "SELECT 1; SELECT 2",
        "SELECT",
        "",
        "-- nothing",
        "SELECT '\ud800'",
        "SELECT '\x00'",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT " + "(" * 500 + "1" + ")" * 500,
        "SELECT " + ", ".join(["1"] * 100),
        "SELECT '" + "x" * 20_000 + "'",
        "SELECT * FROM t, t AS u",
        ENDLESS + "SELECT x FROM c",
        ENDLESS + "SELECT COUNT(*) FROM c",
        ENDLESS + "SELECT x FROM c ORDER BY x DESC LIMIT 1",
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e, t f",
    ],
)
def test_everything_else_is_refused(sql: str) -> None:
    with pytest.raises(QueryRefused):
        rows(sql)


def test_refusals_say_which_limit() -> None:
    with pytest.raises(QueryRefused, match="more than 20 rows"):
        rows("SELECT * FROM t", max_rows=20)
    with pytest.raises(QueryRefused, match="a result of more than 65536 bytes"):
        rows("SELECT " + ", ".join([f"substr(replace('{'a' * 90}', 'a', '{'b' * 90}'), 1, 8000)"] * 10) + " FROM t")
    started = time.monotonic()
    with pytest.raises(QueryRefused, match=r"took more than 0\.05 s or too many steps"):
        rows(ENDLESS + "SELECT COUNT(*) FROM c", seconds=0.05)
    assert time.monotonic() - started < 5


def test_the_end_by_steps_comes_before_the_clock() -> None:
    """So that an episode goes the same way on a slow machine."""
    started = time.monotonic()
    with pytest.raises(QueryRefused, match="too many steps"):
        rows(ENDLESS + "SELECT COUNT(*) FROM c", seconds=600)
    assert time.monotonic() - started < 60


def test_a_query_leaves_nothing_behind() -> None:
    before = bytes(DATA)
    with pytest.raises(QueryRefused):
        rows("INSERT INTO t VALUES (99, 'x')")
    assert before == DATA
    assert rows("SELECT COUNT(*) FROM t") == [(30,)]
    assert sqlite3.threadsafety  # connections are used in the thread that makes them


def seed_of(kind: str) -> int:
    environment = made("sql")
    seeds = [task_seed("train", i, 0) for i in range(1000)]
    return next(seed for seed in seeds if environment.task(seed).question == kind)


@pytest.mark.parametrize("kind", QUESTIONS)
def test_each_kind_of_question_takes_its_query_alone(kind: str) -> None:
    seed = seed_of(kind)
    solution = made("sql").task(seed).solution
    assert [play(made("sql"), seed, [f"= {sql}"])[1][0].reward for sql in (solution, f"{solution} -- so")] == [1, 1]
    wrong = (
        "SELECT 1",
        f"SELECT * FROM ({solution}) LIMIT 0",
        "SELECT",
        f"{solution} UNION ALL {solution}",
        "DROP TABLE x",
    )
    for sql in wrong:
        _, (result,) = play(made("sql"), seed, [f"= {sql}"])
        assert (result.done, result.reward) == (True, 0.0), sql


def test_a_value_that_was_read_off_is_no_answer() -> None:
    """The second database has another result."""
    seed = seed_of("count")
    environment = made("sql")
    task = environment.task(seed)
    _, results = play(environment, seed, [f"query {task.solution}"])
    number = results[0].text.splitlines()[1]
    _, (result,) = play(environment, seed, [f"= SELECT {number}"])
    assert result.reward == 0


def test_order_counts_where_it_is_asked_for_and_only_there() -> None:
    for kind, reward in (("largest", 0.0), ("by_kind", 1.0)):
        seed = seed_of(kind)
        solution = made("sql").task(seed).solution
        reverse = f"SELECT * FROM ({solution}) ORDER BY 1"
        reverse += " DESC" if made("sql")._same_results(made("sql").task(seed), reverse) else ""
        _, (result,) = play(made("sql"), seed, [f"= {reverse}"])
        assert result.reward == reward, kind


def test_a_refused_query_is_a_failed_call() -> None:
    _, (result,) = play(made("sql"), 4, ["query DROP TABLE orders"])
    assert result.text == "error: not authorized"
    assert result.tool_calls == (("query", False),)
    assert result.components["failed_calls"] == 1


def test_options_reach_the_database() -> None:
    environment = made("sql", options=SqlOptions(num_rows=12))
    table = environment.question(environment.task(4)).split("), ")[1].split("(")[0]
    _, results = play(environment, 4, [f"query SELECT COUNT(*) FROM {table}"])
    assert results[0].text.splitlines()[1] == "12"
