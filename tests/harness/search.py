"""Searching through SQL as a user would, and judging what comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psycopg

from dev.datasets import vector_text
from tests.harness import exact
from tests.harness.cluster import assert_index_used


@dataclass
class Found:
    ids: list[int]
    distances: list[float]


def search_sql(table: str, metric: str, k: int, type_name: str = "vector") -> str:
    return Searchable(table, metric=metric, type_name=type_name).sql(k)


def search(
    connection: psycopg.Connection, table: str, metric: str, query: np.ndarray, k: int = 10,
    type_name: str = "vector",
) -> Found:
    """The k nearest by the index; asserts that the distances do not decrease."""
    found = _fetch(connection, search_sql(table, metric, k, type_name), query)
    exact.assert_sorted(found.distances)
    return found


def _fetch(connection: psycopg.Connection, sql: str, query: np.ndarray, **options) -> Found:
    rows = connection.execute(sql, {"q": vector_text(query)}, **options).fetchall()
    return Found([r[0] for r in rows], [r[1] for r in rows])


@dataclass(frozen=True)
class Searchable:
    """Rows of a table with the index (or all the indexes) that must answer a search of them."""

    table: str = "t"
    index: str | tuple[str, ...] = "t_polign"
    metric: str = "cosine"
    type_name: str = "vector"
    column: str = "embedding"
    where: str = "true"
    hidden_rows: bool = False
    """Whether the index may have many rows that the snapshot does not see, which are as good as filtered."""

    @property
    def distance(self) -> str:
        return f"{self.column} {exact.OPERATORS[self.metric]} %(q)s::{self.type_name}"

    def sql(self, k: int) -> str:
        where = "" if self.where == "true" else f"WHERE {self.where} "
        return (f"SELECT id, {self.distance} AS distance FROM {self.table} {where}"
                f"ORDER BY {self.distance} LIMIT {k}")

    def by_index(
        self, connection: psycopg.Connection, queries: np.ndarray, k: int = 10, target_recall: float = 0
    ) -> list[Found]:
        """What the index gives for each query, after a look at the plan. In order, unless the index was
        exhausted: then the rows that were found late come last, in order themselves."""
        # Undone at the end, so that a transaction of the caller keeps its own settings.
        with connection.transaction(force_rollback=True):
            connection.execute(
                "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true), "
                f"set_config('polign.target_recall', '{target_recall}', true)"
            )
            for index in (self.index,) if isinstance(self.index, str) else self.index:
                assert_index_used(connection, index, self.sql(k), {"q": vector_text(queries[0])})
            # A plan kept from another call may go another way than the one that was just looked at.
            found = [_fetch(connection, self.sql(k), query, prepare=False) for query in queries]
        for one in found:
            late = exact.descents(one.distances)
            # With few rows wanted, none filtered and enough found, it has no reason to be exhausted.
            many = self.hidden_rows or k > 10 or self.where != "true" or len(one.ids) < k
            may_be_exhausted = target_recall < 1 and many
            assert late <= may_be_exhausted, f"order lost: {one.distances}"
        return found

    def by_sort(self, connection: psycopg.Connection, query: np.ndarray, k: int = 10) -> Found:
        """Exact search, in a form that no index can serve; without rows that have no distance."""
        sql = (
            f"SELECT id, distance FROM (SELECT id, {self.distance} AS distance FROM {self.table} "
            f"WHERE {self.where} OFFSET 0) AS all_rows "
            f"WHERE distance <> 'NaN' ORDER BY distance LIMIT {k}"
        )
        return _fetch(connection, sql, query)

    def assert_exact(self, connection: psycopg.Connection, queries: np.ndarray, k: int = 20) -> None:
        """At full recall the index gives what exact search gives, ties aside."""
        found = self.by_index(connection, queries, k, target_recall=1)
        for by_index, query in zip(found, queries, strict=True):
            by_sort = self.by_sort(connection, query, k)
            assert by_index.distances == by_sort.distances
            assert_same_ids(by_index, by_sort)

    def mean_recall(self, connection: psycopg.Connection, queries: np.ndarray, k: int = 10) -> float:
        """At the default target: the share of the distances of exact search that the index gives."""
        shares = []
        for found, query in zip(self.by_index(connection, queries, k), queries, strict=True):
            best = self.by_sort(connection, query, k).distances
            assert len(found.ids) == len(set(found.ids)) == len(best), "duplicates, or LIMIT not filled"
            shares.append(sum(d <= best[-1] for d in found.distances) / len(best) if best else 1.0)
        return float(np.mean(shares))


def mean_recall(
    connection: psycopg.Connection, table: str, index: str, metric: str, base: np.ndarray,
    queries: np.ndarray, k: int = 10, type_name: str = "vector",
) -> float:
    """Mean recall@k over the queries; asserts that the plan uses `index`."""
    assert_index_used(
        connection, index, search_sql(table, metric, k, type_name), {"q": vector_text(queries[0])}
    )
    shares = []
    for query in queries:
        found = search(connection, table, metric, query, k, type_name)
        assert len(set(found.ids)) == k, "duplicates, or LIMIT not filled"
        shares.append(exact.recall(metric, base, query, found.ids, k))
    return float(np.mean(shares))


def assert_equals_exact(
    connection: psycopg.Connection, table: str, index: str, metric: str, queries: np.ndarray, k: int = 10,
    type_name: str = "vector",
) -> None:
    """The index gives what exact search gives, at `polign.target_recall = 1`, ties aside."""
    Searchable(table, index, metric, type_name).assert_exact(connection, queries, k)


def assert_same_ids(one: Found, other: Found) -> None:
    """The same rows at each distance; among the last ones a tie may be cut differently by LIMIT."""
    def groups(found: Found) -> dict[float, set[int]]:
        by_distance: dict[float, set[int]] = {}
        for row, distance in zip(found.ids, found.distances, strict=True):
            by_distance.setdefault(distance, set()).add(row)
        by_distance.pop(found.distances[-1], None) if found.distances else None
        return by_distance

    assert groups(one) == groups(other)
    assert len(set(one.ids)) == len(set(other.ids)) == len(one.ids)
