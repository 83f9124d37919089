"""Questions over two tables of a database: the policy explores with queries and answers with one.

prompt  customers(id, name, city), orders(id, customer_id, product, quantity)
        How many orders have product 'tea'?
policy  query SELECT product, quantity FROM orders LIMIT 2
tool    product | quantity …
policy  = SELECT COUNT(*) FROM orders WHERE product = 'tea'

The answer is a query, compared by its result with the right one's, also on a second database of the same tables with other
rows: a number that was read off the first one is no answer to the question.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tunix_core.environment_config import SqlOptions
from tunix_core.environments.rubric import Component, Episode, Rubric
from tunix_core.environments.sqlite_queries import QueryRefused, ResultSet, database, run_query
from tunix_core.environments.tool_environment import Script, ScriptedEnvironment
from tunix_core.threads import on_thread
from tunix_core.tools.formats import Call
from tunix_core.tools.functions import ToolError

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ian", "Jo", "Kim", "Leo", "Mia", "Ned", "Ola", "Pia", "Quin", "Rosa", "Sam", "Tea")  # fmt: skip


class Theme(NamedTuple):
    """Names and values of the two tables."""

    owners: str
    owner_kind: str
    owner_values: tuple[str, ...]
    items: str
    link: str
    item_kind: str
    item_values: tuple[str, ...]
    amount: str


THEMES = (
    Theme("customers", "city", ("Bonn", "Lyon", "Oslo", "Turin"), "orders", "customer_id", "product", ("tea", "rice", "soap", "ink"), "quantity"),
    Theme("students", "school", ("North", "South", "East"), "exams", "student_id", "subject", ("art", "maths", "music", "sport"), "points"),
    Theme("ships", "flag", ("red", "green", "blue"), "trips", "ship_id", "port", ("Cork", "Gdansk", "Porto", "Riga"), "crates"),
)  # fmt: skip


class Question(NamedTuple):
    """A kind of question: its words and the query that answers it, with `{kind}` and `{value}` of owners, `{item}` of
    items, and a `{number}`."""

    text: str
    sql: str
    is_ordered: bool = False


QUESTIONS = {
    "count": Question(
        "How many {t.items} have {t.item_kind} '{item}'?",
        "SELECT COUNT(*) FROM {t.items} WHERE {t.item_kind} = '{item}'",
    ),
    "total": Question(
        "What is the total {t.amount} of all {t.items} of {t.owners} with {t.owner_kind} '{value}'?",
        "SELECT SUM(i.{t.amount}) FROM {t.items} i JOIN {t.owners} o ON o.id = i.{t.link} WHERE o.{t.owner_kind} = '{value}'",
    ),
    "many": Question(
        "Which {t.owners} have more than {number} {t.items}? Give their ids.",
        "SELECT {t.link} FROM {t.items} GROUP BY {t.link} HAVING COUNT(*) > {number}",
    ),
    "none": Question(
        "Which {t.owners} have no {t.items} with {t.item_kind} '{item}'? Give their names and ids.",
        "SELECT name, id FROM {t.owners} WHERE id NOT IN (SELECT {t.link} FROM {t.items} WHERE {t.item_kind} = '{item}')",
    ),
    "largest": Question(
        "Which {number} {t.items} have the largest {t.amount}? Give their ids, the largest first, equal ones by id.",
        "SELECT id FROM {t.items} ORDER BY {t.amount} DESC, id LIMIT {number}",
        is_ordered=True,
    ),
    "by_kind": Question(
        "For each {t.item_kind} of {t.items} with {t.amount} above {number}: how many are there? Give {t.item_kind} and count.",
        "SELECT {t.item_kind}, COUNT(*) FROM {t.items} WHERE {t.amount} > {number} GROUP BY {t.item_kind}",
    ),
}


class SqlTask(NamedTuple):
    """One instance."""

    theme: int
    question: str
    value: str
    item: str
    number: int
    rows_seed: int
    """Of the two databases."""

    @property
    def solution(self) -> str:
        return self._filled(QUESTIONS[self.question].sql)

    @property
    def text(self) -> str:
        return self._filled(QUESTIONS[self.question].text)

    def _filled(self, text: str) -> str:
        return text.format(t=THEMES[self.theme], value=self.value, item=self.item, number=self.number)


class Sql(ScriptedEnvironment[SqlTask]):
    """Reward 1 for a query with the right result on both databases."""

    name = "sql"
    options_type = SqlOptions
    options: SqlOptions
    task_instructions = (
        "You answer questions about a SQLite database. Look at it with queries; answer with one SELECT statement that "
        "gives the result asked for, and nothing else."
    )

    def draw(self, rng: random.Random) -> SqlTask:
        theme = rng.randrange(len(THEMES))
        return SqlTask(
            theme,
            rng.choice(list(QUESTIONS)),
            rng.choice(THEMES[theme].owner_values),
            rng.choice(THEMES[theme].item_values),
            rng.randrange(2, 6),
            rng.randrange(2**31),
        )

    def question(self, task: SqlTask) -> str:
        theme = THEMES[task.theme]
        owners = f"{theme.owners}(id, name, {theme.owner_kind})"
        return f"{owners}, {theme.items}(id, {theme.link}, {theme.item_kind}, {theme.amount})\n{task.text}"

    async def begin(self) -> None:
        self._data = self._databases(self.instance)

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.query]

    def query(self, sql: str) -> str:
        """Runs a SELECT statement and shows its rows.

        Args:
            sql: the statement.
        """
        try:
            return self._run(self._data[0], sql).text()
        except QueryRefused as error:
            raise ToolError(f"error: {error}") from error

    def rubric(self) -> Rubric:
        return Rubric(Component("answer", self._is_right))

    def script(self, task: SqlTask) -> Script:
        shown = self._run(self._databases(task)[0], task.solution).text()
        return Script([(Call("query", {"sql": task.solution}), shown)], task.solution)

    async def _is_right(self, episode: Episode) -> float:
        if episode.answer is None:
            return 0.0
        return float(await on_thread(self._same_results, episode.task, episode.answer))

    def _same_results(self, task: SqlTask, sql: str) -> bool:
        for data in self._databases(task):
            try:
                given = self._run(data, sql).rows
            except QueryRefused:
                return False
            wanted = self._run(data, task.solution).rows
            ordered = QUESTIONS[task.question].is_ordered
            if given != wanted if ordered else collections.Counter(given) != collections.Counter(wanted):
                return False
        return True

    def _run(self, data: bytes, sql: str) -> ResultSet:
        return run_query(data, sql, max_rows=self.options.max_result_rows, seconds=self.options.query_seconds)

    def _databases(self, task: SqlTask) -> tuple[bytes, bytes]:
        return _two_databases(task, self.options.num_rows)


@functools.lru_cache(maxsize=64)  # the members of a group ask for the same
def _two_databases(task: SqlTask, num_items: int) -> tuple[bytes, bytes]:
    """The first two of the task's whose results differ, and hold something: else guessing might do."""
    theme = THEMES[task.theme]
    for number in itertools.count():
        pair = [_filled_database(theme, f"{task.rows_seed}/{number}/{which}", num_items) for which in (0, 1)]
        first, second = (run_query(data, task.solution, max_rows=num_items, seconds=60).rows for data in pair)
        if not QUESTIONS[task.question].is_ordered:
            first, second = sorted(first), sorted(second)
        if first and second and first != second and (None,) not in first + second:
            return pair[0], pair[1]
    raise AssertionError("unreachable")


def _filled_database(theme: Theme, seed: str, num_items: int) -> bytes:
    rng = random.Random(seed)
    num_owners = max(3, min(len(_NAMES), num_items // 4))
    names = rng.sample(_NAMES, num_owners)
    owners = [(i, name, rng.choice(theme.owner_values)) for i, name in enumerate(names, 1)]
    items = [
        (i, rng.randint(1, num_owners), rng.choice(theme.item_values), rng.randint(1, 20))
        for i in range(1, num_items + 1)
    ]
    columns = f"id INTEGER PRIMARY KEY, {theme.link} INTEGER, {theme.item_kind} TEXT, {theme.amount} INTEGER"
    return database(
        [
            (f"CREATE TABLE {theme.owners} (id INTEGER PRIMARY KEY, name TEXT, {theme.owner_kind} TEXT)", ()),
            (f"CREATE TABLE {theme.items} ({columns})", ()),
            (f"INSERT INTO {theme.owners} VALUES (?, ?, ?)", owners),
            (f"INSERT INTO {theme.items} VALUES (?, ?, ?, ?)", items),
        ]
    )
