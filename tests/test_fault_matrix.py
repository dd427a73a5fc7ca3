"""Whatever the store does during whatever operation: nothing is lost, nothing is wrong, the operation ends or
is retried, and an error says what happened.

`make test` tries some of the combinations, `make soak` all of them.
"""

import itertools
import threading
import time
from contextlib import contextmanager

import psycopg
import pytest

from dev.datasets import load
from dev.process import wait_until
from tests.harness import soak
from tests.harness.cluster import Cluster
from tests.harness.vectors import random_vectors
from tests.test_crash_matrix import check, prepare
from tests.test_crash_matrix import perform as perform_write

PREFIX = "faults"
FETCH_TIMEOUT = 1
"""Seconds; while a fault that lasts is in force. One that passes is outlasted in the usual time."""
ENDS_WITHIN = 30
"""Seconds. An upload has 4 more than polign.fetch_timeout for each MiB, an operation has several requests,
and the machine may be busy."""
DELTA_LIMIT = 100

# What the error of an operation that the fault ended says about it.
CAUSES = {
    "refused": "cannot be reached",
    "reset": "cannot be reached",
    "500": "InternalError",
    "503": "SlowDown",
    "stall": "took too long",
    "truncate": "ended early",
    "applied-500": "InternalError",
    "expired": "ExpiredToken",
}
# These make the operation fail if they last; through the others a part of it can succeed.
FATAL = {"refused", "reset", "500", "503", "stall", "expired"}
ALL_WRITES, SEGMENTS, READS = ("PUT", ""), ("PUT", ".seg"), ("GET", ".seg")
# Each with the requests that it makes before an empty cache: their methods, and parts of their keys.
OPERATIONS = {
    "build": [ALL_WRITES, SEGMENTS],
    "build beside inserts": [ALL_WRITES, SEGMENTS],
    "insert": [ALL_WRITES, SEGMENTS],
    "search": [READS],
    "flush": [ALL_WRITES, SEGMENTS],
    "compact": [READS, ALL_WRITES, SEGMENTS],
    "vacuum": [READS, ALL_WRITES, SEGMENTS],
    "verify": [READS],
}
PASSING, LASTING = 2, float("inf")


def combinations():
    """Operation, fault, the requests that it is for, and how many of them it is for."""
    for operation, fault in itertools.product(OPERATIONS, CAUSES):
        for requests in OPERATIONS[operation]:
            if fault == ("applied-500" if requests == READS else "truncate"):
                continue  # a read changes nothing; the answer to a PUT has no body
            if fault == "refused" and requests == SEGMENTS:
                continue  # it is for all requests
            for times in (PASSING, LASTING):
                if (fault, times) == ("expired", PASSING):
                    continue  # not retried: the next operation reads the credentials again
                yield operation, fault, requests, times


COMBINATIONS = soak.some(list(combinations()), 11)


@pytest.fixture(scope="module")
def faulty(install, run_directory, s3_settings, bucket):
    settings = {
        **s3_settings, "polign.store": f"s3://{bucket}/{PREFIX}", "polign.delta_limit": 0,
    }
    cluster = Cluster.create(install, run_directory / "faulty", settings)
    yield cluster
    cluster.destroy()


@pytest.fixture
def database(faulty, proxy):
    database = faulty.database()
    yield database
    proxy.lift()
    faulty.reset_settings()
    database.drop()


class InForce:
    """A fault while an operation runs, and whether the operation met it."""

    def __init__(self, proxy, fault: str, requests: tuple[str, str], times: float):
        self.proxy, self.fault, self.requests, self.times = proxy, fault, requests, times
        self.hit = 0

    @contextmanager
    def applied(self):
        first = len(self.proxy.requests)
        if self.fault == "refused":
            over = threading.Timer(FETCH_TIMEOUT / 3, self.proxy.accept)
            self.proxy.refuse()
            if self.times == PASSING:
                over.start()
            try:
                yield self
            finally:
                over.cancel()
                self.proxy.accept()
            self.hit = 1
            return
        seconds = FETCH_TIMEOUT / 4 if self.times == PASSING else float("inf")
        with self.proxy.fault(self.fault, *self.requests, times=self.times, seconds=seconds) as fault:
            yield self
            self.hit = fault.hit
        assert len(self.proxy.requests) > first, "the operation made no request"


def perform(connection, database, operation: str) -> None:
    if operation == "build beside inserts":
        build_beside_inserts(connection, database)
    elif operation == "insert":
        load(connection, "t", random_vectors(2 * DELTA_LIMIT, 16, 8), 20_000)
        load(connection, "t", random_vectors(2 * DELTA_LIMIT, 16, 9), 30_000)
    elif operation == "search":
        check_search(connection)
    elif operation == "verify":
        assert connection.execute("SELECT * FROM polign.verify('i', true)").fetchall() == []
    else:
        perform_write(connection, operation)


def check_search(connection) -> None:
    query = ",".join(["0.1"] * 16)
    connection.execute("SET enable_seqscan = off; SET enable_sort = off")
    connection.execute(f"SELECT id FROM t ORDER BY embedding <-> '[{query}]' LIMIT 20").fetchall()


def build_beside_inserts(connection, database) -> None:
    """Rows are inserted from before the build until after its end."""
    over, inserted = threading.Event(), threading.Event()
    errors = []

    def insert() -> None:
        try:
            with database.connect() as other:
                ((first,),) = other.execute("SELECT max(id) + 1 FROM t").fetchall()
                for row in itertools.count(first):
                    load(other, "t", random_vectors(1, 16, row), row)
                    inserted.set()
                    if over.wait(0.01):
                        return
        except psycopg.Error as error:
            errors.append(error)
            inserted.set()

    inserting = threading.Thread(target=insert)
    inserting.start()
    try:
        inserted.wait(30)
        connection.execute("REINDEX INDEX CONCURRENTLY i")
    finally:
        over.set()
        inserting.join(30)
    assert not errors, errors


def remove_invalid(connection) -> None:
    """What a REINDEX CONCURRENTLY that failed leaves for its user to drop."""
    left = connection.execute(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 't'::regclass AND NOT indisvalid"
    ).fetchall()
    for (index,) in left:
        connection.execute(f"DROP INDEX {index}")


def assert_says_what_happened(text: str, fault: str) -> None:
    assert f"s3://polign-test/{PREFIX}" in text
    assert CAUSES[fault] in text
    assert "HINT" in text
    if fault == "expired":
        assert "polign.credentials_file" in text or "VACUUM" in text


def as_text(diagnostic) -> str:
    parts = {"": "message_primary", "DETAIL: ": "message_detail", "HINT: ": "message_hint"}
    given = ((name, getattr(diagnostic, part)) for name, part in parts.items())
    return "\n".join(f"{name}{text}" for name, text in given if text)


@pytest.mark.soak
@pytest.mark.parametrize(("operation", "fault", "requests", "times"), COMBINATIONS)
def test_fault(faulty, database, proxy, s3_server, operation, fault, requests, times):
    log_begin = faulty.postgres.log.stat().st_size
    warnings: list[str] = []
    with database.connect() as connection:
        connection.add_notice_handler(lambda diagnostic: warnings.append(as_text(diagnostic)))
        vectors = prepare(connection, operation)
        asked = vectors[::300]
        faulty.configure(
            polign__delta_limit=DELTA_LIMIT if operation in ("insert", "vacuum") else 0,
            polign__fetch_timeout=f"{FETCH_TIMEOUT}s" if times == LASTING else None,
        )
        connection.execute("SELECT polign.cache_clear()")
        error = None
        started = time.monotonic()
        with InForce(proxy, fault, requests, times).applied() as in_force:
            try:
                perform(connection, database, operation)
            except psycopg.Error as raised:
                error = raised
            assert time.monotonic() - started < ENDS_WITHIN
            if operation == "insert":
                assert error is None, "inserting needs no store"
                wait_until(
                    lambda: "could not move rows" in log_since(faulty, log_begin)
                    or connection.execute("SELECT delta_rows FROM polign.index_info('i')").fetchone()[0]
                    < DELTA_LIMIT,
                    ENDS_WITHIN, "the flush in the background neither fails nor ends",
                )
        assert in_force.hit, "the operation did not meet the fault"
        faulty.reset_settings()

        told = [text for text in warnings if "s3://" in text]
        if error is not None:
            assert error.sqlstate == "58030"
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            told.append(as_text(error.diag))
        if operation == "insert" and "could not move rows" in log_since(faulty, log_begin):
            log = log_since(faulty, log_begin)
            told.append(log[log.index("could not move rows"):])
        if times == LASTING:
            assert told or fault not in FATAL, "the operation succeeded without the store"
        else:
            assert not told, told
        for text in told:
            assert_says_what_happened(text, fault)
        everything = "\n".join([*warnings, *told, log_since(faulty, log_begin)])
        assert s3_server.secret_key not in everything

        remove_invalid(connection)
        check(connection, asked)
        for again in (operation, "flush", "vacuum", "compact", "verify"):
            if again not in ("insert", "search"):
                perform(connection, database, again)
        check(connection, asked)
        lists = "SELECT delta_rows, tombstones FROM polign.index_info('i')"
        assert connection.execute(lists).fetchone() == (0, 0)


def log_since(cluster, begin: int) -> str:
    with cluster.postgres.log.open(errors="replace") as log:
        log.seek(begin)
        return log.read()
