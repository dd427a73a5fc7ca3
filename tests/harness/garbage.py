"""Indexes with garbage, polign.gc(), and what a store holds."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pytest

from dev.datasets import load
from dev.s3 import S3Client
from tests.harness.owners import Owners, owners
from tests.harness.search import search
from tests.harness.vectors import random_vectors

DIM = 16
ROWS = 600


@dataclass(frozen=True)
class Row:
    object: str
    bytes: int
    reason: str
    index: str
    deleted: bool
    kept: str | None


def collect(connection, older_than: str = "0", dry_run: bool = False, store: str | None = None) -> list[Row]:
    rows = connection.execute("SELECT * FROM polign.gc(%s, %s, %s)", (older_than, dry_run, store)).fetchall()
    return [Row(*row) for row in rows]


@dataclass(frozen=True)
class Store:
    """A prefix of the bucket."""

    client: S3Client
    bucket: str
    prefix: str

    def keys(self) -> dict[str, int]:
        """Keys of segments, with their bytes."""
        found = self.client.list(self.bucket, f"{self.prefix}/")
        strip = len(self.prefix) + 1
        return {key[strip:]: size for key, size in found.items() if key.endswith(".seg")}

    def owners(self) -> dict[str, Owners]:
        return owners(self.client, self.bucket, self.prefix)

    def put(self, key: str, body: bytes = b"x") -> None:
        self.client.put(self.bucket, f"{self.prefix}/{key}", body)

    def exists(self, key: str) -> bool:
        return f"{self.prefix}/{key}" in self.client.list(self.bucket, f"{self.prefix}/{key}")

    def begin_upload(self, key: str) -> str:
        """A multipart upload with one part of five bytes; its name."""
        path = f"/{self.bucket}/{self.prefix}/{key}"
        begun = self.client.request("POST", path, {"uploads": ""}).decode()
        name = begun.split("<UploadId>")[1].split("<")[0]
        self.client.request("PUT", path, {"partNumber": "1", "uploadId": name}, b"12345")
        return name

    def uploads(self) -> list[str]:
        """Keys of uploads that nobody finished."""
        query = {"uploads": "", "prefix": f"{self.prefix}/"}
        found = self.client.request("GET", f"/{self.bucket}", query).decode()
        strip = len(self.prefix) + 1
        return [part.split("<")[0][strip:] for part in found.split("<Key>")[1:]]


def create(connection, table="t", index="i"):
    connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, embedding vector({DIM}))")
    load(connection, table, random_vectors(ROWS, DIM))
    connection.execute(f"CREATE INDEX {index} ON {table} USING polign_ivf (embedding vector_l2_ops)")


def assert_whole(connection, rows=ROWS, table="t"):
    """Every row is found through the index, with nothing but the store to read from."""
    connection.execute("SELECT polign.cache_clear()")
    connection.execute("SET polign.target_recall = 1; SET enable_seqscan = off")
    assert len(search(connection, table, "l2", random_vectors(1, DIM, 99)[0], 2 * rows).ids) == rows


def let_transactions_pass(connection):
    """Snapshots of now are newer than what is garbage by now."""
    connection.execute("SELECT pg_current_xact_id()")
    connection.execute("SELECT pg_current_xact_id()")


def retire(connection):
    """Makes every object of the index garbage."""
    connection.execute("DELETE FROM t WHERE id % 3 = 0")
    connection.execute("VACUUM t")
    connection.execute("SELECT polign.compact('i')")
    let_transactions_pass(connection)
    return ROWS - ROWS // 3


def index_keys(connection, store, index) -> set[str]:
    """The segments of an index."""
    index_id = connection.execute("SELECT index_id FROM polign.index_info(%s)", (index,)).fetchone()[0]
    keys = store.keys()
    return {key for key in keys if index_id in key}


def leave_pending(cluster, connection, proxy, count=50):
    """A flush whose object is in the store, and that does not know."""
    cluster.configure(polign__fetch_timeout="1s")
    load(connection, "t", random_vectors(count, DIM, 3), ROWS)
    lost = proxy.fault("applied-500", "PUT", ".seg"), proxy.fault("500", "HEAD", ".seg")
    with lost[0], lost[1], pytest.raises(psycopg.Error):
        connection.execute("SELECT polign.flush('i')")
    cluster.configure(polign__fetch_timeout=None)
