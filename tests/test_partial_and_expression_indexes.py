"""Indexes of some rows, of an expression, and several on one column."""

import pytest

from tests.harness.cluster import indexes_used
from tests.harness.search import Searchable
from tests.harness.tables import TABLE, assert_right, churn, create_table, vector


def index(column: str, opclass: str = "vector_cosine_ops", where="true", name="t_polign") -> str:
    return f"CREATE INDEX {name} ON t USING polign_ivf ({column} {opclass}) WHERE {where}"


def test_a_partial_index(connection):
    create_table(connection)
    connection.execute("UPDATE t SET note = 'out' WHERE id % 3 = 0")
    connection.execute(index("embedding", where="note IS NULL"))
    inside = Searchable(where="note IS NULL")
    narrower = Searchable(where="note IS NULL AND id < 2000")
    assert_right(connection, inside)
    # Rows go out of the index, come into it, and change beyond it.
    connection.execute("UPDATE t SET note = 'out' WHERE id % 5 = 0")
    connection.execute("UPDATE t SET note = NULL WHERE id % 9 = 0")
    connection.execute(f"UPDATE t SET embedding = '{vector(2600)}' WHERE id % 30 = 6")
    for statement in ("", "VACUUM t", "REINDEX INDEX t_polign", "VACUUM FULL t"):
        if statement:
            connection.execute(statement)
        assert_right(connection, inside)
        assert_right(connection, narrower)
        churn(connection)
    # It cannot answer for all rows.
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    sql = TABLE.sql(5).replace("%(q)s", f"'{vector(0)}'")
    assert indexes_used(connection, sql) == []


@pytest.mark.parametrize(("expression", "opclass", "type_name"), [
    ("(embedding::halfvec(64))", "halfvec_cosine_ops", "halfvec"),
    ("(subvector(embedding, 1, 32)::vector(32))", "vector_cosine_ops", "vector"),
    ("(CASE WHEN id % 4 = 0 THEN NULL ELSE embedding END::vector(64))", "vector_cosine_ops", "vector"),
], ids=["halfvec", "part", "null"])
def test_an_expression_index(connection, expression, opclass, type_name):
    create_table(connection)
    connection.execute(index(expression, opclass))
    # The question is longer than the part: it is cut in the same way.
    searchable = Searchable(column=expression.replace("%", "%%"), type_name=type_name)
    if "subvector" in expression:
        searchable = PartSearchable(column=expression)
    for statement in ("", "VACUUM t", "REINDEX INDEX CONCURRENTLY t_polign"):
        if statement:
            connection.execute(statement)
        assert_right(connection, searchable)
        churn(connection)


class PartSearchable(Searchable):
    @property
    def distance(self) -> str:
        return f"{self.column} <=> subvector(%(q)s::vector, 1, 32)"


def test_several_indexes_on_one_column(connection):
    create_table(connection)
    metrics = {"l2": "l2_ops", "ip": "ip_ops", "cosine": "cosine_ops"}
    for metric, opclass in metrics.items():
        connection.execute(index("embedding", f"vector_{opclass}", name=f"t_{metric}"))
    for statement in ("", "VACUUM t", "REINDEX TABLE t"):
        if statement:
            connection.execute(statement)
        for metric in metrics:
            assert_right(connection, Searchable(index=f"t_{metric}", metric=metric))
        churn(connection)
