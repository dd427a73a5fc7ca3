"""Several sessions that repeat a step each, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg

Step = Callable[[psycopg.Connection], None]


class Load:
    """Runs the steps that were added, for so many seconds; the first error ends all and is raised."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._sessions: list[tuple[Callable[[], psycopg.Connection], Step]] = []
        self._over = threading.Event()
        self._errors: list[Exception] = []
        self.steps: dict[str, int] = {}

    def add(self, connect: Callable[[], psycopg.Connection], step: Step) -> None:
        self._sessions.append((connect, step))
        self.steps[step.__name__] = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._run, args=session) for session in self._sessions]
        for thread in threads:
            thread.start()
        self._over.wait(self.seconds)
        self._over.set()
        for thread in threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]
        assert all(self.steps.values()), f"something did not run: {self.steps}"

    def _run(self, connect: Callable[[], psycopg.Connection], step: Step) -> None:
        try:
            with connect() as connection:
                while not self._over.is_set():
                    step(connection)
                    self.steps[step.__name__] += 1
        except Exception as error:  # raised by the test's own thread
            self._errors.append(error)
            self._over.set()

    def pause(self, seconds: float) -> None:
        """For a step that is not to be repeated at full speed."""
        self._over.wait(seconds)
