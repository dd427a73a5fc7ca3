"""Loads the passages, builds the index in the bucket, and shows what a query costs cold and warm."""

from __future__ import annotations

import sys
import textwrap
import time

import numpy as np
import psycopg

from dev.cluster import DevCluster, dev_cluster
from dev.datasets import PASSAGES, load, passages, read_jsonl, vector_text
from dev.paths import CHECKOUT

QUESTION = 152
SEARCH = (
    "SELECT title, text, embedding <=> %(q)s::vector AS distance\n"
    "FROM passages ORDER BY embedding <=> %(q)s::vector LIMIT 10"
)


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def connect(cluster: DevCluster) -> psycopg.Connection:
    client = cluster.client_environment()
    return psycopg.connect(
        host=client["PGHOST"], port=client["PGPORT"], user=client["PGUSER"],
        password=client["PGPASSWORD"], dbname=client["PGDATABASE"], autocommit=True,
    )


def load_passages(connection: psycopg.Connection) -> None:
    """The passages with their texts; nothing to do when they are there already."""
    data = passages()
    (there,) = connection.execute("SELECT to_regclass('passages') IS NOT NULL").fetchone()
    if there:
        (rows,) = connection.execute("SELECT count(*) FROM passages").fetchone()
        print(f"table passages: {rows:,} rows, loaded earlier")
        return
    started = time.monotonic()
    with connection.transaction():
        connection.execute("CREATE TEMP TABLE vectors (id int, embedding vector(384)) ON COMMIT DROP")
        load(connection, "vectors", data.base)
        connection.execute(
            "CREATE TEMP TABLE texts (id int, title text, body text, source text, category text, "
            "year int, words int) ON COMMIT DROP"
        )
        with connection.cursor().copy("COPY texts FROM STDIN") as copy:
            for row in read_jsonl(PASSAGES / "texts.jsonl.gz"):
                copy.write_row(tuple(row[c] for c in
                                     ("id", "title", "text", "source", "category", "year", "n_words")))
        connection.execute(
            "CREATE TABLE passages (id int PRIMARY KEY, title text, text text, source text, "
            "category text, year int, words int, embedding vector(384))"
        )
        connection.execute(
            "INSERT INTO passages SELECT id, title, body, source, category, year, words, embedding "
            "FROM texts JOIN vectors USING (id) ORDER BY id"
        )
    connection.execute("VACUUM ANALYZE passages")
    print(f"table passages: {len(data.base):,} rows loaded in {time.monotonic() - started:.1f} s")


def build_index(connection: psycopg.Connection) -> None:
    statement = "CREATE INDEX passages_embedding ON passages USING polign_ivf (embedding vector_cosine_ops)"
    print(f"{statement};")
    (there,) = connection.execute("SELECT to_regclass('passages_embedding') IS NOT NULL").fetchone()
    if there:
        print("built earlier")
        return
    started = time.monotonic()
    connection.execute(statement)
    print(f"built and uploaded in {time.monotonic() - started:.1f} s")


def timed_search(connection: psycopg.Connection, query: np.ndarray) -> tuple[list[tuple], float, dict]:
    """Rows, milliseconds as the client sees them, and what polign counted."""
    parameters = {"q": vector_text(query)}
    started = time.perf_counter()
    rows = connection.execute(SEARCH, parameters).fetchall()
    milliseconds = (time.perf_counter() - started) * 1000
    return rows, milliseconds, one_row(connection, "SELECT * FROM polign.last_scan()")


def one_row(connection: psycopg.Connection, sql: str) -> dict:
    cursor = connection.execute(sql)
    return dict(zip([c.name for c in cursor.description], cursor.fetchone(), strict=True))


def empty_cache(connection: psycopg.Connection) -> None:
    """Clears it until it stays empty: right after a build or a start, parts are still being taken over."""
    quiet = 0
    while quiet < 3:
        connection.execute("SELECT polign.cache_clear()")
        time.sleep(0.3)
        (parts,) = connection.execute("SELECT parts FROM polign.stat_cache").fetchone()
        quiet = quiet + 1 if parts == 0 else 0


def show_answers(question: str, rows: list[tuple]) -> None:
    print(f'"{question}"\n')
    for place, (title, text, distance) in enumerate(rows, 1):
        print(f"{place:>3}. {distance:.4f}  {title or '(no title)'}")
        print(textwrap.indent(textwrap.shorten(text, 110, placeholder=" ..."), " " * 13))


def show_cost(name: str, milliseconds: float, scan: dict) -> None:
    print(f"{name:<28}{milliseconds:>8.1f} ms {scan['gets']:>5} GETs {scan['get_bytes']:>10,} bytes from S3")


def main() -> None:
    cluster = dev_cluster()
    heading("The table and the index")
    with connect(cluster) as connection:
        load_passages(connection)
        build_index(connection)

        heading("A question and its ten passages")
        question = read_jsonl(PASSAGES / "queries.jsonl.gz")[QUESTION]["question"]
        query = passages().queries[QUESTION]
        rows, _, _ = timed_search(connection, query)
        show_answers(question, rows)

        heading("What it costs")
        empty_cache(connection)
        show_cost("on an emptied cache", *timed_search(connection, query)[1:])
        show_cost("the same again, warm", *timed_search(connection, query)[1:])

        info = "SELECT * FROM polign.index_info('passages_embedding')"
        heading(info)
        for name, value in one_row(connection, info).items():
            print(f"{name:<20} {value:,}" if isinstance(value, int) else f"{name:<20} {value}")

    heading("Try it yourself")
    print(
        f"    cd {CHECKOUT}\n"
        "    make psql                     # or: eval \"$(make -s env)\" && psql\n"
        "    make down                     # stops everything"
    )


if __name__ == "__main__":
    main()
