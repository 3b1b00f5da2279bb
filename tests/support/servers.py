"""A proxy that counts requests to an object store or makes them fail, and a bucket behind the proxy."""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import itertools
import json
import re
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import tensorstore as ts
from stores import BUCKET, Server, environment


@dataclass(frozen=True, slots=True)
class Request:
    """One request that reached the proxy."""

    method: str
    """GET, PUT, HEAD, DELETE, or LIST: the operation on S3, or the equivalent on Google Cloud Storage."""

    key: str
    """The key below the bucket; for a LIST, the prefix."""

    conditional: bool
    """Whether it has If-Match, If-None-Match or ifGenerationMatch."""

    sent_bytes: int

    @property
    def kind(self) -> str:
        """The operation and the kind of file, such as "PUT object"."""
        name = self.key.rpartition("/")[2]
        what = "object" if re.search(r"/c/[0-9/]+$", self.key) else name if name.endswith(".json") else "other"
        return self.method if self.method == "LIST" else f"{self.method} {what}"


@dataclass(slots=True)
class Answer:
    """The server's response, or a replacement."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """A request, and the ways to answer it."""

    def __init__(self, handler: _Handler, body: bytes) -> None:
        self._handler = handler
        self.path = handler.path
        self.key = _asked(handler.command, handler.path, handler.headers)[1]
        self.headers = {name: value for name, value in handler.headers.items() if name.lower() != "expect"}
        self.body = body
        self.connection = handler.number
        self.closing = handler.server.proxy.closing

    def forward(self) -> Answer:
        """Forward the request, and return the server's answer."""
        connection = http.client.HTTPConnection(self._handler.server.proxy.behind, timeout=60)
        try:
            connection.request(self._handler.command, self.path, self.body, self.headers)
            found = connection.getresponse()
            return Answer(found.status, found.getheaders(), found.read())
        finally:
            connection.close()

    def send(self, answer: Answer, *, cut: int | None = None, seconds: float = 0) -> None:
        """Answer, in this time. With `cut`, close the connection after this many bytes of the body."""
        handler = self._handler
        handler.send_response_only(answer.status)
        dropped = {"connection", "transfer-encoding", "content-length"}
        length = str(len(answer.body))
        if handler.command == "HEAD":
            length = next((value for name, value in answer.headers if name.lower() == "content-length"), "0")
        for name, value in answer.headers:
            if name.lower() not in dropped:
                handler.send_header(name, value)
        if answer.status not in (204, 304):
            handler.send_header("Content-Length", length)
        handler.end_headers()
        for start in range(0, len(answer.body) if seconds else 0, part := len(answer.body) // 100 + 1):
            handler.wfile.write(answer.body[start : start + part])
            handler.wfile.flush()
            if self.closing.wait(seconds / 100):
                return
        handler.wfile.write(b"" if seconds else answer.body[:cut])
        handler.wfile.flush()
        if cut is not None:
            handler.close_connection = True

    def reset(self) -> None:
        """Drop the connection, so that the client gets "connection reset by peer"."""
        handler = self._handler
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


Spoil = Callable[[Exchange], None]


def status(code: int, reason: str = "SlowDown") -> Spoil:
    """Answer with an error in the format of S3 or Google. The server does not receive the request."""
    xml = f"<Error><Code>{reason}</Code><Message>on demand</Message></Error>"
    error = {"code": code, "message": "on demand", "errors": [{"reason": reason, "message": "on demand"}]}

    def spoil(exchange: Exchange) -> None:
        kind, body = ("json", json.dumps({"error": error})) if "/storage/v1/" in exchange.path else ("xml", xml)
        exchange.send(Answer(code, [("Content-Type", f"application/{kind}")], body.encode()))

    return spoil


def reset(exchange: Exchange) -> None:
    """Break the connection. The server does not receive the request."""
    exchange.reset()


def lost(exchange: Exchange) -> None:
    """The server executes the request, but its answer is lost."""
    exchange.forward()
    exchange.reset()


def applied(code: int) -> Spoil:
    """The server executes the request, but the answer is an error, as from a gateway."""

    def spoil(exchange: Exchange) -> None:
        exchange.forward()
        status(code)(exchange)

    return spoil


def short(exchange: Exchange) -> None:
    """Send half of the body that Content-Length announces, then close the connection."""
    answer = exchange.forward()
    exchange.send(answer, cut=len(answer.body) // 2)


def halved(exchange: Exchange) -> None:
    """Send half of the body, with a matching Content-Length."""
    answer = exchange.forward()
    answer.body = answer.body[: len(answer.body) // 2]
    exchange.send(answer)


def flipped(at: float) -> Spoil:
    """Flip one bit of the body, at a given fraction of its length."""

    def spoil(exchange: Exchange) -> None:
        answer = exchange.forward()
        if answer.body and answer.status < 300:
            body = bytearray(answer.body)
            body[min(int(at * len(body)), len(body) - 1)] ^= 0x10
            answer.body = bytes(body)
        exchange.send(answer)

    return spoil


def slow(seconds: float) -> Spoil:
    """Delay the answer."""

    def spoil(exchange: Exchange) -> None:
        exchange.closing.wait(seconds)
        exchange.send(exchange.forward())

    return spoil


class StaleListings:
    """A server whose listings are some seconds old: they do not show keys that were first written after that."""

    def __init__(self, proxy: Proxy, seconds: float) -> None:
        self._seconds = seconds
        self._written: dict[str, float] = {}
        proxy.on("PUT .*", self._write)
        proxy.on("LIST", self._list)

    def _write(self, exchange: Exchange) -> None:
        answer = exchange.forward()
        self._written.setdefault(exchange.key, time.monotonic())
        exchange.send(answer)

    def _list(self, exchange: Exchange) -> None:
        answer = exchange.forward()
        new = {key for key, since in self._written.items() if time.monotonic() - since < self._seconds}
        if answer.body.startswith(b"{"):
            listing = json.loads(answer.body)
            listing["items"] = [item for item in listing.get("items", ()) if item["name"] not in new]
            answer.body = json.dumps(listing).encode()
        else:
            for key in new:
                entry = rf"<Contents>\s*<Key>{re.escape(key)}</Key>.*?</Contents>"
                answer.body = re.sub(entry.encode(), b"", answer.body, flags=re.DOTALL)
        exchange.send(answer)


class CachedListings:
    """A server behind a cache that answers a listing as it answered the same listing before."""

    def __init__(self, proxy: Proxy) -> None:
        self._answers: dict[str, Answer] = {}
        proxy.on("LIST", self._list)

    def _list(self, exchange: Exchange) -> None:
        if exchange.path not in self._answers:
            self._answers[exchange.path] = exchange.forward()
        exchange.send(self._answers[exchange.path])


def never(exchange: Exchange) -> None:
    """Send no answer, and keep the connection open."""
    exchange.closing.wait(600)
    exchange.reset()


def trickling(bytes_per_second: float) -> Spoil:
    """Send the answer at this rate."""

    def spoil(exchange: Exchange) -> None:
        answer = exchange.forward()
        exchange.send(answer, seconds=len(answer.body) / bytes_per_second)

    return spoil


class OneConnection:
    """A connection that becomes bad: the one on which request number `first` arrives, from then on."""

    def __init__(self, first: int, spoil: Spoil, otherwise: Spoil) -> None:
        self._numbers = itertools.count()
        self._first = first
        self._spoil = spoil
        self._otherwise = otherwise
        self._bad: int | None = None
        self.has_spoiled = False

    def __call__(self, exchange: Exchange) -> None:
        if next(self._numbers) == self._first:
            self._bad, self.has_spoiled = exchange.connection, True
        (self._spoil if exchange.connection == self._bad else self._otherwise)(exchange)


def unconditional(exchange: Exchange) -> None:
    """The server does not receive the conditions, like a server that does not support them."""
    _forward_without(exchange, ("if-match", "if-none-match"), r"\d+")


def unmatched(exchange: Exchange) -> None:
    """The server supports only the condition that a key does not exist."""
    _forward_without(exchange, ("if-match",), r"[1-9]\d*")


def uncreated(exchange: Exchange) -> None:
    """The server supports every condition except the one that a key does not exist."""
    _forward_without(exchange, ("if-none-match",), "0")


def _forward_without(exchange: Exchange, headers: Sequence[str], generations: str) -> None:
    exchange.headers = {name: value for name, value in exchange.headers.items() if name.lower() not in headers}
    exchange.path = re.sub(rf"(?<=[?&])ifGenerationMatch={generations}(&|$)", "", exchange.path)
    exchange.send(exchange.forward())


@dataclass(slots=True)
class _Rule:
    kinds: re.Pattern[str]
    spoil: Spoil
    skip: int
    times: float


@dataclass(eq=False)
class Proxy:
    """A proxy in front of an endpoint. It records requests and applies the configured faults to them.

    Example:
        >>> with Proxy(endpoint) as proxy:
        ...     proxy.on("PUT manifest.json", lost, times=1)
        ...     ...
        ...     assert proxy.counted()["PUT manifest.json"] == 1
    """

    upstream: str
    virtual_hosts: bool = False
    """Whether it takes the bucket only from the host name, as http://BUCKET.s3.localhost/KEY, and refuses it in the
    path."""

    requests: list[Request] = field(default_factory=list[Request])
    spoiled: int = 0
    """Number of requests that matched a rule."""

    closing: threading.Event = field(default_factory=threading.Event)
    connections: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of the next connections."""

    def __enter__(self) -> Proxy:
        self.behind = urlsplit(self.upstream).netloc
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        host = "{bucket}.s3.localhost" if self.virtual_hosts else "127.0.0.1"
        self.endpoint = f"http://{host}:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def on(self, kinds: str, spoil: Spoil, *, skip: int = 0, times: float = float("inf")) -> None:
        """Apply a fault to requests whose kind matches a regular expression, `times` times after the first `skip`."""
        with self._lock:
            self._rules.append(_Rule(re.compile(kinds), spoil, skip, times))

    def clear(self) -> None:
        """Remove the rules and the recorded requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()
            self.spoiled = 0

    def counted(self) -> collections.Counter[str]:
        """Number of requests of each kind."""
        with self._lock:
            return collections.Counter(request.kind for request in self.requests)

    def _met(self, request: Request) -> Spoil | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.kinds.fullmatch(request.kind):
                    if rule.skip:
                        rule.skip -= 1
                    elif rule.times:
                        rule.times -= 1
                        self.spoiled += 1
                        return rule.spoil
        return None


class _Server(http.server.ThreadingHTTPServer):
    proxy: Proxy
    daemon_threads = True
    request_queue_size = 128

    def shutdown_request(self, request: Any) -> None:
        """Only close it: a connection that will be reset must not be shut down cleanly first."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, because tests do that on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.number = next(self.server.proxy.connections)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.proxy.virtual_hosts:
            bucket, dot, _ = self.headers["Host"].partition(".s3.localhost")
            if not dot:
                Exchange(self, body).send(Answer(400, [], b"<Error><Code>PathStyleRequestNotAllowed</Code></Error>"))
                return
            self.path = f"/{bucket}{self.path}"
            del self.headers["Host"]
        request = Request(*_asked(self.command, self.path, self.headers), len(body))
        spoil = self.server.proxy._met(request)
        exchange = Exchange(self, body)
        if spoil is None:
            exchange.send(exchange.forward())
        else:
            spoil(exchange)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Print nothing, because the requests are recorded."""


def _asked(method: str, path: str, headers: Mapping[str, str]) -> tuple[str, str, bool]:
    """The method, the key, and whether it is conditional, of a request to S3 or Google Cloud Storage."""
    found = urlsplit(path)
    query = parse_qs(found.query)
    google = re.fullmatch(r"(/upload)?/storage/v1/b/[^/]+/o(?:/(.*))?", found.path)
    if google is None:
        if "list-type" in query:
            return "LIST", query.get("prefix", [""])[0], False
        key = unquote(found.path).removeprefix(f"/{BUCKET}").lstrip("/")
        return method, key, any(headers.get(name) for name in ("If-Match", "If-None-Match"))
    upload, key = google.groups()
    if upload:
        return "PUT", query["name"][0], "ifGenerationMatch" in query
    if key is None:
        return "LIST", query.get("startOffset", [""])[0], False
    return "HEAD" if query.get("alt") == ["json"] else method, unquote(key), "ifGenerationMatch" in query


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fresh path in a bucket, reached through a proxy."""

    url: str
    proxy: Proxy

    @property
    def path(self) -> str:
        """The path in the bucket."""
        return self.url.split("/", 3)[3]

    def listed(self, below: str = "") -> list[str]:
        """The existing keys, requested directly from the server."""
        return sorted(key.decode() for key in self._open(f"{self.url}/{below}").list().result())

    def write(self, key: str, content: bytes | None) -> None:
        """Write or delete a key, directly on the server."""
        self._open(f"{self.url}/").write(key, content).result()

    def copy_from(self, source: str, url: str) -> None:
        """Copy a checkpoint key by key, without conditions and without the proxy."""
        found, copy = ts.KvStore.open(f"{source}/").result(), self._open(f"{url}/")
        for key in found.list().result():
            copy.write(key, found.read(key).result().value).result()

    def _open(self, url: str) -> ts.KvStore:
        scheme, _, bucket, path = url.split("/", 3)
        if scheme == "s3:":
            settings = {"endpoint": self.proxy.upstream, "aws_region": "us-east-1"}
            credentials = {"aws_credentials": {"type": "environment"}}
            spec = {"driver": "s3", "bucket": bucket, "path": path, **settings, **credentials}
            return ts.KvStore.open(spec).result()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORSTORE_GCS_HTTP_URL", self.proxy.upstream)
            context = ts.Context(
                {"gcs_request_retries": {"max_retries": 3}}
            )  # a separate context; the default one has a client for the proxy
            return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "path": path}, context=context).result()


@contextlib.contextmanager
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch, *, virtual_hosts: bool = False) -> Iterator[Bucket]:
    """Direct the URLs of this process and its children to a proxy in front of a server."""
    # A proxy may have the port of an earlier one, behind which the server supported conditional writes.
    monkeypatch.setattr("jaxckpt._store.bucket._verified_stores", set[str]())
    with Proxy(server.endpoint, virtual_hosts) as proxy:
        for name, value in environment(server.scheme, proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield Bucket(f"{server.scheme}://{server.fresh_bucket()}/{uuid.uuid4().hex[:8]}", proxy)
