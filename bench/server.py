"""A server for one benchmark run, with real S3."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dev.datasets import Dataset, create_table
from dev.paths import dev_dir, pg_version
from dev.s3 import REGION
from dev.s3server import S3Server
from dev.tools import ensure_postgres
from tests.harness.cluster import TEMPLATE_DATABASE, Cluster
from tests.harness.s3proxy import S3Proxy

BUCKET = "polign-bench"
PREFIX = "bench"
DATABASE = "bench"


@dataclass
class BenchServer:
    cluster: Cluster
    s3: S3Server
    proxy: S3Proxy
    directory: Path

    def connect(self):
        return self.cluster.connect(DATABASE)

    def load(self, data: Dataset) -> None:
        """Tables items and queries, both (id int, embedding vector)."""
        self.cluster.ensure_template()
        self.cluster.execute(f"CREATE DATABASE {DATABASE} TEMPLATE {TEMPLATE_DATABASE}")
        with self.connect() as connection:
            create_table(connection, "items", data.base)
            create_table(connection, "queries", data.queries)
            connection.execute("VACUUM ANALYZE items")

    def store_bytes(self) -> int:
        objects = self.s3.client().list(BUCKET, PREFIX)
        return sum(size for key, size in objects.items() if key.endswith(".seg"))

    def through_proxy(self) -> None:
        """From now on requests to S3 are counted and can be disturbed."""
        self.cluster.configure(polign__s3_endpoint=self.proxy.endpoint)


@contextmanager
def bench_server(**settings: object):
    directory = dev_dir() / "bench"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    s3 = S3Server(directory / "s3")
    s3.start(bucket=BUCKET)
    proxy = S3Proxy(s3.port)
    try:
        cluster = Cluster.create(ensure_postgres(pg_version()), directory / "pg", {
            "shared_buffers": "1GB",
            "maintenance_work_mem": "1GB",
            "polign.store": f"s3://{BUCKET}/{PREFIX}",
            "polign.s3_endpoint": s3.endpoint,
            "polign.s3_region": REGION,
            "polign.credentials_file": s3.credentials_file,
            "polign.fetch_timeout": "30s",
            **settings,
        })
        try:
            yield BenchServer(cluster, s3, proxy, directory)
        finally:
            cluster.destroy()
    finally:
        proxy.close()
        s3.stop()
        shutil.rmtree(directory, ignore_errors=True)
