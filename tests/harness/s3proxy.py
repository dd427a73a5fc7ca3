"""An S3 reverse proxy that counts requests and injects faults.

It stands between polign-store and the real S3 server, so that what is counted is what went over the
wire. Requests pass through byte for byte: the signature covers the Host header, the server checks it
against the header that it receives, and so a request signed for the proxy's address stays valid.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

CHUNK = 256 * 1024
HEAD_LIMIT = 256 * 1024


@dataclass
class Request:
    """One request as seen on the wire. Times are seconds of the monotonic clock."""

    method: str
    key: str
    kind: str
    query: str
    """As it stands behind the question mark."""
    range: str | None
    started: float
    ended: float | None = None
    status: int | None = None
    bytes_in: int = 0
    """Body bytes from the client."""
    bytes_out: int = 0
    """Body bytes to the client."""


@dataclass
class Fault:
    """What happens to a request that `matches`; `times` limits how often."""

    action: str
    matches: Callable[[Request], bool]
    times: float = float("inf")
    seconds: float = 0.0
    hit: int = 0
    released: asyncio.Event | None = field(default=None, repr=False)


ACTIONS = {
    "reset": "the connection is reset after the request was read",
    "500": "answers InternalError; the server never sees the request",
    "503": "answers SlowDown; the server never sees the request",
    "403": "answers AccessDenied",
    "expired": "answers ExpiredToken, as when the credentials have run out",
    "stall": "nothing happens until the fault is lifted or `seconds` are over, then the request is served",
    "truncate": "half of the answer's body, then the connection ends",
    "short": "half of the answer's body, with a length that says so: a success that is none",
    "empty": "the same with no body at all",
    "applied-500": "the server applies the request, the client is told InternalError",
    "delay": "the request waits `seconds`, then is served",
    "ahead": "the Date of the answer is `seconds` later than it was",
    "unlisted": "a list without entries, as from a store that shows old ones",
    "undated": "a list that does not say when its entries were written",
    "endless": "a list without entries that is said to have more",
    "corrupt": "one byte in the middle of the answer's body is flipped",
}
# Actions that change the text of a list.
REWRITTEN = {
    "unlisted": [(rb"<Contents>.*</Contents>", b"")],
    "undated": [(rb"<LastModified>[^<]*</LastModified>", b"")],
    "endless": [
        (rb"<Contents>.*</Contents>", b""),
        (rb"<IsTruncated>[^<]*</IsTruncated>", b"<IsTruncated>true</IsTruncated>"),
    ],
}
ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "403": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "applied-500": (500, "InternalError"),
}


class Recording(list):
    """The requests of an interval."""

    def of(self, *kinds: str) -> Recording:
        return Recording(r for r in self if r.kind in kinds)

    @property
    def kinds(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for request in self:
            counts[request.kind] = counts.get(request.kind, 0) + 1
        return counts

    @property
    def bytes_out(self) -> int:
        return sum(r.bytes_out for r in self)

    @property
    def waves(self) -> int:
        """The longest chain of requests each begun after the one before it had ended.

        Requests that do not depend on each other may look like a chain when they are fast: give the
        proxy a delay when this is asserted.
        """
        depths: list[tuple[float, int]] = []
        for request in sorted(self, key=lambda r: r.started):
            depth = 1 + max((d for ended, d in depths if ended <= request.started), default=0)
            depths.append((request.ended or float("inf"), depth))
        return max((d for _, d in depths), default=0)


def classify(method: str, target: str) -> tuple[str, str]:
    """(kind, object key) of a path-style request."""
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = parse_qs(parts.query, keep_blank_values=True)
    if not key:
        return ("list" if method == "GET" else "head" if method == "HEAD" else "bucket"), ""
    if "uploads" in query or "uploadId" in query:
        return "multipart", key
    return {"GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete"}.get(method, "other"), key


class S3Proxy:
    """Runs in a thread of its own; every method may be called from the test's thread."""

    def __init__(self, upstream_port: int):
        self.upstream_port = upstream_port
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.accept()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.lift()
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # Counting.

    @contextmanager
    def record(self):
        """Collects the requests that begin inside the `with` block."""
        recording, first = Recording(), len(self.requests)
        try:
            yield recording
        finally:
            self.settle()
            recording.extend(self.requests[first:])

    def settle(self, seconds: float = 5) -> None:
        """Waits until no request is in flight."""
        deadline = time.monotonic() + seconds
        while any(r.ended is None for r in list(self.requests)) and time.monotonic() < deadline:
            time.sleep(0.01)

    # Faults.

    @contextmanager
    def fault(
        self,
        action: str,
        method: str | None = None,
        key: str = "",
        query: str = "",
        times: float = float("inf"),
        seconds: float = float("inf"),
    ):
        """Applies a fault inside the `with` block to requests of `method` whose key and query
        contain these."""
        if action not in ACTIONS:
            raise ValueError(f"no action {action}")
        fault = Fault(
            action,
            lambda r: method in (None, r.method) and key in r.key and query in r.query,
            times,
            seconds,
            released=asyncio.Event(),
        )
        self._faults.append(fault)
        try:
            yield fault
        finally:
            self._lift(fault)

    def lift(self) -> None:
        for fault in list(self._faults):
            self._lift(fault)
        if self._server is None and self._thread.is_alive():
            self.accept()

    def _lift(self, fault: Fault) -> None:
        if fault in self._faults:
            self._faults.remove(fault)
        self._loop.call_soon_threadsafe(fault.released.set)

    @contextmanager
    def refusing(self):
        """Inside the `with` block connections are refused, as when the store is down."""
        self.refuse()
        try:
            yield
        finally:
            self.accept()

    def refuse(self) -> None:
        self._call(self._refuse())

    def accept(self) -> None:
        self._call(self._accept())

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _accept(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", self.port, limit=HEAD_LIMIT, reuse_address=True
            )
            self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            reset(writer)

    def _fault_for(self, request: Request) -> Fault | None:
        for fault in list(self._faults):
            if fault.hit < fault.times and fault.matches(request):
                fault.hit += 1
                return fault
        return None

    # One client connection, with one connection to the server behind it.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        upstream = Upstream(self.upstream_port)
        try:
            while await self._serve_one(reader, writer, upstream):
                pass
        except (OSError, asyncio.IncompleteReadError, EndOfAnswer):
            pass
        finally:
            self._open.discard(writer)
            upstream.close()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve_one(self, reader, writer, upstream: Upstream) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        method, target, headers = parse_head(head)
        kind, key = classify(method, target)
        query = urlsplit(target).query
        request = Request(method, key, kind, query, headers.get("range"), time.monotonic())
        self.requests.append(request)
        try:
            return await self._answer(request, head, headers, reader, writer, upstream)
        finally:
            request.ended = time.monotonic()

    async def _answer(self, request, head, headers, reader, writer, upstream: Upstream) -> bool:
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = body_chunks(reader, headers)
        fault = self._fault_for(request)
        action = fault.action if fault else None
        if action in ("stall", "delay"):
            with suppress(asyncio.TimeoutError):
                seconds = None if fault.seconds == float("inf") else fault.seconds
                await asyncio.wait_for(fault.released.wait(), seconds)
        if action == "reset":
            reset(writer)
            return False
        if action in ERRORS and action != "applied-500":
            async for chunk in body:
                request.bytes_in += len(chunk)
            await send_error(writer, request, *ERRORS[action])
            return True

        await upstream.send(head)
        async for chunk in body:
            request.bytes_in += len(chunk)
            await upstream.send(chunk)
        answer_head, status, answer_headers = await upstream.read_head()
        answer = upstream.answer_chunks(request.method, status, answer_headers)
        if action == "applied-500":
            async for _ in answer:
                pass
            await send_error(writer, request, *ERRORS[action])
            return True
        request.status = status
        length = int(answer_headers.get("content-length", 0))
        if action in ("short", "empty"):
            sent = length // 2 if action == "short" else 0
            writer.write(re.sub(rb"(?i)(content-length:) *\d+", rb"\1 %d" % sent, answer_head))
            async for chunk in answer:
                chunk = chunk[: sent - request.bytes_out]
                request.bytes_out += len(chunk)
                writer.write(chunk)
            await writer.drain()
            return True
        if action in REWRITTEN:
            text = b"".join([chunk async for chunk in answer])
            for pattern, by in REWRITTEN[action]:
                text = re.sub(pattern, by, text, flags=re.DOTALL)
            writer.write(re.sub(rb"(?i)(content-length:) *\d+", rb"\1 %d" % len(text), answer_head) + text)
            request.bytes_out += len(text)
            await writer.drain()
            return True
        if action == "ahead":
            later = formatdate(time.time() + fault.seconds, usegmt=True).encode()
            answer_head = re.sub(rb"(?i)\r\ndate:[^\r]*", b"\r\nDate: " + later, answer_head)
        writer.write(answer_head)
        async for chunk in answer:
            if action == "truncate" and request.bytes_out + len(chunk) > length // 2:
                chunk = chunk[: length // 2 - request.bytes_out]
                writer.write(chunk)
                request.bytes_out += len(chunk)
                await writer.drain()
                return False
            if action == "corrupt" and request.bytes_out <= length // 2 < request.bytes_out + len(chunk):
                at = length // 2 - request.bytes_out
                chunk = chunk[:at] + bytes([chunk[at] ^ 0x40]) + chunk[at + 1 :]
            request.bytes_out += len(chunk)
            writer.write(chunk)
            await writer.drain()
        await writer.drain()
        return answer_headers.get("connection", "").lower() != "close"


class EndOfAnswer(Exception):
    """The server closed the connection."""


class Upstream:
    """The connection to the real server."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=HEAD_LIMIT
            )
        self.writer.write(data)
        await self.writer.drain()

    async def read_head(self) -> tuple[bytes, int, dict[str, str]]:
        while True:
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                raise EndOfAnswer from None
            _, status, headers = parse_head(head)
            if int(status) >= 200:  # an interim "100 Continue" was already given to the client
                return head, int(status), headers

    async def answer_chunks(self, method: str, status: int, headers: dict[str, str]):
        if method == "HEAD" or status in (204, 304):
            return
        async for chunk in body_chunks(self.reader, headers):
            yield chunk

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """The first two words of the first line, and the headers in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    headers = {}
    for line in itertools.takewhile(bool, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return words[0], words[1], headers


async def body_chunks(reader: asyncio.StreamReader, headers: dict[str, str]):
    """The body as raw pieces: a chunked body comes with its framing, to be passed on as it is."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if size == 0:
                while line != b"\r\n":  # trailers, up to an empty line
                    yield line
                    line = await reader.readuntil(b"\r\n")
                yield line
                return
            yield line + await reader.readexactly(size + 2)
    left = int(headers.get("content-length", 0))
    while left:
        chunk = await reader.read(min(left, CHUNK))
        if not chunk:
            raise EndOfAnswer
        left -= len(chunk)
        yield chunk


async def send_error(writer: asyncio.StreamWriter, request: Request, status: int, code: str) -> None:
    request.status = status
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>injected</Message><RequestId>0</RequestId></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    writer.write(head + (b"" if request.method == "HEAD" else body))
    await writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
