"""Random schedules of what happens to a table with an index; every search is compared with exact search in
the same snapshot.

One thread takes all steps, so that a seed names a schedule: statements of several sessions, each of which
may be in a transaction, in an order that the seed decides. (The random numbers of a build, and when work in
the background is done, do not come from the seed.) Each session changes rows of its own, so none waits for
another.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import psycopg

from dev.datasets import vector_text
from tests.harness.cluster import Database
from tests.harness.search import Searchable

SESSIONS = 3
STEPS = 45
# For statements that would wait for another session: none should.
SESSION_SETTINGS = "SET lock_timeout = '20s'; SET statement_timeout = '100s'"
ISOLATION_LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")

# How often each step is taken; the names are those of methods of Schedule.
STEP_WEIGHTS = {
    "begin": 8,
    "end": 8,
    "savepoint": 4,
    "roll_back_to_savepoint": 4,
    "insert": 14,
    "delete": 8,
    "update": 10,
    "search": 30,
    "between_transactions": 8,
    "alone": 4,
    "maintain": 6,
    "kill_store": 1,
    "restart": 0.5,
}
# Statements of a session that is in no transaction, while the others may be in one.
BETWEEN_TRANSACTIONS = {
    "VACUUM (TRUNCATE off) t": 8,
    "VACUUM (FREEZE, INDEX_CLEANUP on, TRUNCATE off) t": 2,
    "ANALYZE t": 1,
    "CHECKPOINT": 1,
    "SELECT polign.cache_clear()": 1,
    "SELECT count(*) FROM polign.gc(interval '0', dry_run => false)": 2,
}
# Statements that wait for all transactions, so those are ended first.
ALONE = {
    "REINDEX INDEX t_polign": 3,
    "REINDEX INDEX CONCURRENTLY t_polign": 2,
    "VACUUM t": 2,
    "VACUUM FULL t": 1,
    "TRUNCATE t": 0.5,
}


class Difference(AssertionError):
    """Something that must not happen in a schedule; the text tells how to see it again."""


@dataclass
class Tally:
    """What all schedules together did."""

    steps: Counter = field(default_factory=Counter)
    schedules: int = 0
    shares: list[float] = field(default_factory=list)
    """Of each search at the default settings: how many of the rows wanted it found."""

    @property
    def recall(self) -> float:
        return float(np.mean(self.shares)) if self.shares else 1.0

    def __str__(self) -> str:
        return f"{self.schedules} schedules, recall {self.recall:.4f} at the default, {dict(self.steps)}"


@dataclass
class Session:
    number: int
    connection: psycopg.Connection
    savepoints: int = 0

    @property
    def in_transaction(self) -> bool:
        return self.connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE


class Schedule:
    """One table and its sessions, from one seed."""

    def __init__(self, database: Database, seed: int, tally: Tally):
        self.database, self.seed, self.tally = database, seed, tally
        self.random = np.random.default_rng(seed)
        self.trace: list[str] = []
        self.sessions: list[Session] = []
        self.rows = 0

    def run(self) -> None:
        try:
            self.connect()
            self.create_table()
            for _ in range(STEPS):
                step = self.choose(STEP_WEIGHTS)
                session = self.sessions[self.random.integers(SESSIONS)]
                try:
                    getattr(self, step)(session)
                    self.tally.steps[step] += 1
                except psycopg.errors.SerializationFailure:
                    self.execute(session, "ROLLBACK")
            self.end_all()
            for session in self.sessions:
                self.search(session)
            self.verify(self.sessions[0])
        except Exception as error:
            again = f"POLIGN_SEED={self.seed} shows it again. What was done:"
            raise Difference("\n".join([repr(error), again, *self.trace])) from error
        finally:
            self.disconnect()
        self.tally.schedules += 1

    # What the seed decides.

    def choose(self, weights: dict[str, float]) -> str:
        shares = np.array(list(weights.values()))
        return list(weights)[self.random.choice(len(shares), p=shares / shares.sum())]

    def one_of(self, *choices):
        return choices[self.random.integers(len(choices))]

    def vector(self) -> str | None:
        """Near one of a few centres; now and then on it, or zero, or none."""
        centre = self.one_of(*self.centres)
        kind = self.random.random()
        if kind < 0.03:
            return None
        if kind < 0.05:
            return vector_text(np.zeros_like(centre))
        spread = 0 if kind < 0.15 else 0.5
        return vector_text(centre + self.random.normal(0, spread, centre.shape))

    def own_rows(self, session: Session) -> str:
        """A part of the rows that this session may change."""
        modulus = int(self.one_of(2, 5, 13))
        return f"id % {SESSIONS} = {session.number} AND id / {SESSIONS} % {modulus} = 1"

    # The table and its sessions.

    def connect(self) -> None:
        for number in range(SESSIONS):
            connection = self.database.connect()
            connection.execute(SESSION_SETTINGS)
            self.sessions.append(Session(number, connection))

    def disconnect(self) -> None:
        for session in self.sessions:
            session.connection.close()
        self.sessions.clear()

    def execute(self, session: Session, statement: str) -> None:
        self.note(session, statement)
        session.connection.execute(statement)

    def note(self, session: Session, what: str) -> None:
        self.trace.append(f"  {session.number}: {what}")

    def create_table(self) -> None:
        session = self.sessions[0]
        dims = int(self.one_of(3, 8, 17, 32))
        self.centres = self.random.normal(0, 1, (self.random.integers(2, 30), dims))
        self.type_name = self.one_of("vector", "vector", "halfvec")
        self.metric = self.one_of("l2", "ip", "cosine")
        self.execute(session, "DROP TABLE IF EXISTS t")
        self.execute(
            session, f"CREATE TABLE t (id int PRIMARY KEY, embedding {self.type_name}({dims}), note int) "
            f"WITH (fillfactor = {self.one_of(50, 100)})"
        )
        # Low, so that rows are flushed in the background too.
        self.database.cluster.configure(polign__delta_limit=int(self.one_of(0, 40, 400)))
        self.copy(session, self.one_of(0, 50, 400, 1000))
        self.execute(
            session, f"CREATE INDEX t_polign ON t USING polign_ivf "
            f"(embedding {self.type_name}_{self.metric}_ops) WITH (lists = {self.one_of(0, 0, 1, 8, 40)})"
        )

    def copy(self, session: Session, count: int) -> None:
        self.note(session, f"COPY of {count} rows from {self.rows}")
        with session.connection.cursor().copy("COPY t (id, embedding) FROM STDIN") as copy:
            for _ in range(count):
                copy.write_row((self.rows * SESSIONS + session.number, self.vector()))
                self.rows += 1

    # Steps.

    def begin(self, session: Session) -> None:
        if not session.in_transaction:
            self.execute(session, f"BEGIN ISOLATION LEVEL {self.one_of(*ISOLATION_LEVELS)}")
            session.savepoints = 0

    def end(self, session: Session) -> None:
        if session.in_transaction:
            self.execute(session, self.one_of("COMMIT", "COMMIT", "ROLLBACK"))

    def end_all(self) -> None:
        for session in self.sessions:
            try:
                self.end(session)
            except psycopg.errors.SerializationFailure:
                self.note(session, "was rolled back")

    def savepoint(self, session: Session) -> None:
        if session.in_transaction:
            session.savepoints += 1
            self.execute(session, f"SAVEPOINT s{session.savepoints}")

    def roll_back_to_savepoint(self, session: Session) -> None:
        if session.in_transaction and session.savepoints:
            session.savepoints = int(self.random.integers(1, session.savepoints + 1))
            self.execute(session, f"ROLLBACK TO s{session.savepoints}")

    def insert(self, session: Session) -> None:
        self.copy(session, int(self.one_of(1, 1, 5, 40, 150)))

    def delete(self, session: Session) -> None:
        self.execute(session, f"DELETE FROM t WHERE {self.own_rows(session)}")

    def update(self, session: Session) -> None:
        vector = self.vector()
        value = f"'{vector}'" if vector else "NULL"
        change = self.one_of(f"embedding = {value}", "embedding = embedding, note = 1", "note = 2")
        self.execute(session, f"UPDATE t SET {change} WHERE {self.own_rows(session)}")

    def between_transactions(self, session: Session) -> None:
        if not session.in_transaction:
            self.execute(session, self.choose(BETWEEN_TRANSACTIONS))

    def alone(self, session: Session) -> None:
        self.end_all()
        self.execute(session, self.choose(ALONE))

    def maintain(self, session: Session) -> None:
        """Also in a transaction, whose rows are moved before it ends."""
        self.execute(session, f"SELECT polign.{self.one_of('flush', 'compact')}('t_polign')")

    def kill_store(self, session: Session) -> None:
        self.note(session, "kill -9 of polign-store")
        for pid in self.database.cluster.store_pids():
            os.kill(pid, signal.SIGKILL)

    def restart(self, session: Session) -> None:
        cluster = self.database.cluster
        end = self.one_of(cluster.stop, cluster.crash)
        self.note(session, f"the server: {end.__name__}")
        end()
        cluster.start()
        self.disconnect()
        self.connect()

    def verify(self, session: Session) -> None:
        self.note(session, "verify")
        assert session.connection.execute("SELECT * FROM polign.verify('t_polign', true)").fetchall() == []

    def search(self, session: Session) -> None:
        where = self.one_of("true", "true", "id %% 3 = 0", "note IS NULL")
        searchable = Searchable(
            "t", "t_polign", self.metric, self.type_name, where=where, hidden_rows=True
        )
        centre = self.one_of(*self.centres)
        queries = [centre + self.random.normal(0, self.one_of(0, 0.5), centre.shape)]
        k = int(self.one_of(1, 10, 10, 50, 100_000))
        exactly = self.random.random() < 0.6
        self.note(session, f"{'exact' if exactly else 'default'} search of {k} WHERE {where}")
        if exactly:
            searchable.assert_exact(session.connection, queries, k)
        else:
            share = searchable.mean_recall(session.connection, queries, k)
            if k < 100_000:
                self.tally.shares.append(share)
