"""The proxy itself: the other tests believe what it counts."""

import socket
import threading
import time

import pytest

from dev.s3 import S3Error

BODY = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def object_key(s3_server, bucket, proxy):
    key = "proxy/object"
    s3_server.client().put(bucket, key, BODY)
    return key


def test_signed_requests_pass_and_are_counted(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    with proxy.record() as seen:
        assert client.get(bucket, object_key) == BODY
        assert client.list(bucket, "proxy/") == {object_key: len(BODY)}
        client.put(bucket, "proxy/other", b"abc")
    assert seen.kinds == {"get": 1, "list": 1, "put": 1}
    assert seen.of("get").bytes_out == len(BODY)
    assert seen.of("put")[0].bytes_in == 3
    assert all(r.status == 200 for r in seen)
    assert seen.waves == 3


def test_wrong_keys_are_rejected_through_the_proxy(bucket, proxy, object_key):
    from dev.s3 import S3Client

    with pytest.raises(S3Error) as error:
        S3Client(proxy.endpoint, "WRONG", "wrong").get(bucket, object_key)
    assert error.value.status == 403


def test_parallel_requests_are_one_wave(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    with proxy.fault("delay", seconds=0.2), proxy.record() as seen:
        threads = [threading.Thread(target=client.get, args=(bucket, object_key)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.get(bucket, object_key)
    assert len(seen) == 5
    assert seen.waves == 2


@pytest.mark.parametrize(
    ("action", "status"), [("500", 500), ("503", 503), ("403", 403), ("expired", 400)]
)
def test_injected_status(s3_server, bucket, proxy, object_key, action, status):
    client = s3_server.client(proxy.endpoint)
    with proxy.fault(action, method="GET", times=1) as fault:
        with pytest.raises(S3Error) as error:
            client.get(bucket, object_key)
        assert error.value.status == status
        assert client.get(bucket, object_key) == BODY
    assert fault.hit == 1


def test_put_applied_but_answered_500(s3_server, bucket, proxy):
    client = s3_server.client(proxy.endpoint)
    with proxy.fault("applied-500", method="PUT"), pytest.raises(S3Error):
        client.put(bucket, "proxy/ambiguous", b"there")
    assert s3_server.client().get(bucket, "proxy/ambiguous") == b"there"


def test_a_fault_is_for_one_kind_of_request(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    path = f"/{bucket}/{object_key}"
    with proxy.fault("503", "GET", "object", query="max-parts=", times=2) as fault:
        assert client.get(bucket, object_key) == BODY
        assert client.list(bucket, "proxy/object") == {object_key: len(BODY)}
        for _ in range(2):
            with pytest.raises(S3Error) as error:
                client.request("GET", path, {"max-parts": "1"})
            assert error.value.status == 503
    assert fault.hit == 2


def test_reset_truncation_and_corruption(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    with proxy.fault("reset"), pytest.raises(OSError):
        client.get(bucket, object_key)
    with proxy.fault("truncate"), pytest.raises(Exception, match="(?i)incomplete"):
        client.get(bucket, object_key)
    with proxy.fault("corrupt"):
        damaged = client.get(bucket, object_key)
    assert sum(a != b for a, b in zip(damaged, BODY, strict=True)) == 1
    assert client.get(bucket, object_key) == BODY


def test_refused_connections(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    with proxy.refusing(), pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    assert client.get(bucket, object_key) == BODY


def test_a_stall_ends_when_it_is_lifted(s3_server, bucket, proxy, object_key):
    client = s3_server.client(proxy.endpoint)
    answers = []
    started = time.monotonic()
    with proxy.fault("stall"):
        thread = threading.Thread(target=lambda: answers.append(client.get(bucket, object_key)))
        thread.start()
        time.sleep(0.5)
        assert not answers
    thread.join(10)
    assert answers == [BODY]
    assert time.monotonic() - started >= 0.5
