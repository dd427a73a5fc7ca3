"""The supervisor and the store process: how they start, what they survive, how they end."""

import concurrent.futures
import os
import signal
import stat
import time
from pathlib import Path

import psycopg
import pytest

from dev import process


def one_store(cluster, timeout=10):
    """Waits until exactly one store process runs; its PID."""
    process.wait_until(lambda: len(cluster.store_pids()) == 1, timeout, "there is not one store process")
    return cluster.store_pids()[0]


def use_the_store(cluster):
    """A statement that needs the store process."""
    cluster.execute("CREATE EXTENSION IF NOT EXISTS polign CASCADE")
    cluster.execute("SELECT polign.cache_clear()")


@pytest.mark.smoke
def test_it_starts_with_the_server_when_preloaded(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    one_store(cluster)


@pytest.mark.smoke
def test_the_first_backend_that_needs_it_starts_it(own_cluster):
    cluster = own_cluster(shared_preload_libraries="")
    assert cluster.store_pids() == []
    use_the_store(cluster)
    one_store(cluster)


def test_many_backends_start_one(own_cluster):
    cluster = own_cluster(shared_preload_libraries="")
    cluster.execute("CREATE EXTENSION polign CASCADE")
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: cluster.execute("SELECT polign.cache_clear()"), range(20)))
    pid = one_store(cluster)
    time.sleep(1)
    assert cluster.store_pids() == [pid]


def test_without_a_worker_slot_the_error_says_what_to_do(own_cluster):
    cluster = own_cluster(shared_preload_libraries="", max_worker_processes=0)
    cluster.execute("CREATE EXTENSION polign CASCADE")
    with pytest.raises(psycopg.errors.InsufficientResources, match="no background worker slot") as raised:
        cluster.execute("SELECT polign.cache_clear()")
    assert "shared_preload_libraries" in raised.value.diag.message_hint


def test_a_killed_store_process_comes_back(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    first = one_store(cluster)
    with cluster.connect() as bystander:
        backend = bystander.info.backend_pid
        os.kill(first, signal.SIGKILL)
        use_the_store(cluster)
        assert one_store(cluster) != first
        assert bystander.execute("SELECT pg_backend_pid()").fetchone()[0] == backend


def test_a_stopped_store_process_can_be_cancelled(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    pid = one_store(cluster)
    os.kill(pid, signal.SIGSTOP)
    try:
        with cluster.connect() as connection:
            connection.execute("SET statement_timeout = '300ms'")
            began = time.monotonic()
            with pytest.raises(psycopg.errors.QueryCanceled):
                connection.execute("SELECT polign.cache_clear()")
            assert time.monotonic() - began < 1.3
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        os.kill(pid, signal.SIGCONT)
    use_the_store(cluster)


def test_a_changed_cache_directory_is_taken_over(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    first = one_store(cluster)
    cluster.configure(polign__cache_dir="elsewhere")
    directory = cluster.postgres.data / "elsewhere"
    process.wait_until(lambda: (directory / "sock").exists(), 10, "no socket in the new directory")
    assert one_store(cluster) != first
    use_the_store(cluster)


def test_a_cache_directory_of_another_server_is_refused(own_cluster):
    first = own_cluster(polign__cache_dir="shared-cache")
    use_the_store(first)
    second = own_cluster(polign__cache_dir=str(first.postgres.data / "shared-cache"))
    with pytest.raises(psycopg.errors.ObjectInUse) as raised:
        use_the_store(second)
    assert str(first.postgres.data) in raised.value.diag.message_detail
    assert "polign.cache_dir" in raised.value.diag.message_hint
    use_the_store(first)
    second.configure(polign__cache_dir="pgsql_tmp_polign/pgsql_tmp")
    process.wait_until((second.cache_directory / "sock").exists, 20, "no store process of its own")
    use_the_store(second)


@pytest.mark.parametrize("preload", ["polign", ""])
def test_a_cache_directory_that_cannot_be_written_costs_the_cache_only(own_cluster, preload):
    cluster = own_cluster(shared_preload_libraries=preload, polign__cache_dir="/proc/nowhere")
    for _ in range(5):
        use_the_store(cluster)
        time.sleep(0.5)
    pid = one_store(cluster)
    assert "cannot write to its cache directory" in cluster.postgres.log.read_text()
    cluster.configure(polign__cache_dir="pgsql_tmp_polign/pgsql_tmp")
    socket = cluster.cache_directory / "sock"
    process.wait_until(socket.exists, 10, "the cache does not come back")
    use_the_store(cluster)
    assert one_store(cluster) != pid


def test_cache_and_socket_are_private(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    directory = cluster.cache_directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in directory.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_shutdown_takes_the_store_process_along(own_cluster, how):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    pid = one_store(cluster)
    began = time.monotonic()
    cluster.stop(how)
    assert time.monotonic() - began < 3
    process.wait_until(lambda: not is_running(pid), 5, "the store process outlives the server")
    if how == signal.SIGINT:
        # pg_rewind cannot remove a directory with a socket in it.
        assert not (cluster.cache_directory / "sock").exists()


def test_shutdown_does_not_wait_for_a_stuck_store_process(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    pid = one_store(cluster)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < 4
    process.wait_until(lambda: not is_running(pid), 5, "the stuck store process outlives the server")


def test_a_killed_postmaster_takes_the_store_process_along(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    pid = one_store(cluster)
    cluster.crash()
    process.wait_until(lambda: not is_running(pid), 5, "the store process outlives the server")
    cluster.start()
    use_the_store(cluster)


def test_a_killed_supervisor_costs_a_crash_restart_and_no_more(own_cluster):
    cluster = own_cluster(shared_preload_libraries="polign")
    use_the_store(cluster)
    first = one_store(cluster)
    supervisor = int(Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    process.wait_until(lambda: not is_running(first), 5, "the store process outlives its supervisor")
    process.wait_until(lambda: answers(cluster), 20, "the server does not come back")
    use_the_store(cluster)
    assert one_store(cluster) != first


def answers(cluster):
    try:
        return cluster.execute("SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
