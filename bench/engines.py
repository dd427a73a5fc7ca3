"""What is compared inside Postgres: how each kind of index is built, searched and tuned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psycopg

from tests.harness.cluster import Cluster, assert_index_used, indexes_used

INDEX = "items_embedding"


@dataclass(frozen=True)
class Engine:
    name: str
    access_method: str | None
    knob: str
    values: tuple[float, ...]
    default: float
    """Of the knob, as the software comes."""
    few_questions: bool = False
    """Whether a search takes so long that only some of the questions are asked."""

    def create_index(self, rows: int) -> str | None:
        if self.access_method is None:
            return None
        # What pgvector's README advises up to a million rows.
        lists = f" WITH (lists = {max(10, rows // 1000)})" if self.name == "ivfflat" else ""
        return (f"CREATE INDEX {INDEX} ON items USING {self.access_method} "
                f"(embedding vector_cosine_ops){lists}")

    def prefer(self, cluster: Cluster) -> None:
        """With small tables and thorough settings the planner would rather read the table."""
        cluster.configure(enable_seqscan="off" if self.access_method else None)

    def settings(self, rows: int) -> list[str]:
        """The sweep, from fast to thorough."""
        most = max(10, rows // 1000) if self.name == "ivfflat" else np.inf
        return [self.setting(value) for value in self.values if value <= most]

    def setting(self, value: float) -> str:
        return f"{self.knob}={value:g}"

    def assert_used(self, connection: psycopg.Connection, k: int = 10) -> None:
        """The searches go the way that is to be measured."""
        sql = search_sql("0", k)
        if self.access_method:
            assert_index_used(connection, INDEX, sql)
        else:
            assert INDEX not in indexes_used(connection, sql)


ENGINES = {engine.name: engine for engine in (
    Engine("polign", "polign_ivf", "polign.target_recall",
           (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995), 0),
    Engine("hnsw", "hnsw", "hnsw.ef_search", (10, 20, 40, 60, 100, 160, 250, 400), 40),
    Engine("ivfflat", "ivfflat", "ivfflat.probes", (1, 2, 4, 8, 16, 32, 64), 1),
    # Without an index: one process reads all rows, or three do.
    Engine("exact", None, "max_parallel_workers_per_gather", (0, 2), 2, few_questions=True),
)}
QUESTIONS_OF_EXACT = 50


def search_sql(question: str, k: int = 10) -> str:
    """The k nearest of a question by number; the number as the client writes parameters."""
    return (
        "SELECT id FROM items "
        f"ORDER BY embedding <=> (SELECT embedding FROM queries WHERE id = {question}) LIMIT {k}"
    )


def measured_recall(connection: psycopg.Connection, setting: str, truth: np.ndarray, k: int = 10) -> float:
    """Mean recall@k over the questions; a row that did not come is a row not found."""
    connection.execute(f"SET {setting}")
    sql = search_sql("%s", k)
    shares = []
    for number, expected in enumerate(truth[:, :k]):
        rows = connection.execute(sql, (number,), prepare=True).fetchall()
        shares.append(len({r[0] for r in rows} & set(expected.tolist())) / len(expected))
    return float(np.mean(shares))
