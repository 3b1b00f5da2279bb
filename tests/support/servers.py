"""Object stores for tests: real servers in child processes, and a proxy that spoils or counts what passes through it.

A server reads its standard input and ends when that closes: it never outlives the test run, however that ends.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import tensorstore as ts

BUCKET = "checkpoints"
KEY = SECRET = "S3RVER"  # the only pair that s3rver knows; moto takes any
CACHE = Path(__file__).parents[1] / ".cache"

_START_SECONDS = 60
_MOTO = """
import logging, sys, urllib.request
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
request = urllib.request.Request(f"http://127.0.0.1:{port}/" + sys.argv[1], method="PUT")
urllib.request.urlopen(request, timeout=30).close()
print(port, flush=True)
sys.stdin.read()
"""
_S3RVER = """
const S3rver = require("s3rver")
const [directory, bucket] = process.argv.slice(1)
new S3rver({address: "127.0.0.1", port: 0, silent: true, directory, configureBuckets: [{name: bucket}]})
    .run().then(({port}) => console.log(port))
process.stdin.on("end", () => process.exit()).resume()
"""


def environment(endpoint: str) -> dict[str, str]:
    """What points s3:// URLs to a server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """moto's S3 server, which honours conditions; its endpoint. It keeps all in memory."""
    with _child([sys.executable, "-c", _MOTO, BUCKET], Path.cwd()) as endpoint:
        yield endpoint


@contextlib.contextmanager
def s3rver(folder: Path) -> Iterator[str]:
    """s3rver, which ignores conditions; its endpoint. LookupError where npm cannot bring it."""
    home = CACHE / "s3rver"
    if not (home / "node_modules" / "s3rver").is_dir():
        npm = shutil.which("npm")
        if npm is None:
            raise LookupError("npm is not installed")
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text('{"private": true}')
        command = [npm, "install", "--no-audit", "--no-fund", "s3rver@3.7.1"]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise LookupError(f"npm could not install s3rver: {done.stderr[-300:]}")
    with _child(["node", "-e", _S3RVER, str(folder), BUCKET], home) as endpoint:
        yield endpoint


@contextlib.contextmanager
def _child(command: Sequence[str], folder: Path) -> Iterator[str]:
    child = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        # Killed where it says nothing for too long: its output ends then, and so does the wait for a line of it.
        timer = threading.Timer(_START_SECONDS, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        assert line, f"the server did not start: {command[0]}"
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        child.kill()
        child.communicate()


@dataclass(frozen=True, slots=True)
class Request:
    """One request that reached the proxy."""

    method: str
    """GET, PUT, HEAD, DELETE, or LIST."""

    key: str
    """What it names below the bucket; of a LIST, the prefix."""

    conditional: bool
    """Whether it has If-Match or If-None-Match."""

    sent_bytes: int

    @property
    def kind(self) -> str:
        """What is asked of which kind of file, such as "PUT object"."""
        name = self.key.rpartition("/")[2]
        what = "object" if re.search(r"/c/[0-9/]+$", self.key) else name if name.endswith(".json") else "other"
        return self.method if self.method == "LIST" else f"{self.method} {what}"


@dataclass(slots=True)
class Answer:
    """What the server said, or what is sent in its place."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Exchange:
    """A request, and the ways to answer it."""

    def __init__(self, handler: _Handler, body: bytes) -> None:
        self._handler = handler
        self.headers = {name: value for name, value in handler.headers.items() if name.lower() != "expect"}
        self.body = body
        self.closing = handler.server.proxy.closing

    def forward(self) -> Answer:
        """The server's own answer."""
        connection = http.client.HTTPConnection(self._handler.server.proxy.behind, timeout=60)
        try:
            connection.request(self._handler.command, self._handler.path, self.body, self.headers)
            found = connection.getresponse()
            return Answer(found.status, found.getheaders(), found.read())
        finally:
            connection.close()

    def send(self, answer: Answer, *, cut: int | None = None) -> None:
        """Answer; with `cut`, close the connection after so many bytes of the body."""
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
        handler.wfile.write(answer.body[:cut])
        handler.wfile.flush()
        if cut is not None:
            handler.close_connection = True

    def reset(self) -> None:
        """Drop the connection, so that the client's kernel says "connection reset by peer"."""
        handler = self._handler
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


Spoil = Callable[[Exchange], None]


def status(code: int, reason: str = "SlowDown") -> Spoil:
    """Answers with an error, as S3 words it; the server sees nothing."""
    body = f"<Error><Code>{reason}</Code><Message>told to</Message></Error>".encode()
    return lambda exchange: exchange.send(Answer(code, [("Content-Type", "application/xml")], body))


def reset(exchange: Exchange) -> None:
    """The connection breaks; the server sees nothing."""
    exchange.reset()


def lost(exchange: Exchange) -> None:
    """The server does what it is asked, and its answer is lost."""
    exchange.forward()
    exchange.reset()


def short(exchange: Exchange) -> None:
    """Half of the body that Content-Length announces, then the connection closes."""
    answer = exchange.forward()
    exchange.send(answer, cut=len(answer.body) // 2)


def halved(exchange: Exchange) -> None:
    """Half of the body, as if that were all of it."""
    answer = exchange.forward()
    answer.body = answer.body[: len(answer.body) // 2]
    exchange.send(answer)


def flipped(at: float) -> Spoil:
    """One bit of the body is flipped, so far into it."""

    def spoil(exchange: Exchange) -> None:
        answer = exchange.forward()
        if answer.body and answer.status < 300:
            body = bytearray(answer.body)
            body[min(int(at * len(body)), len(body) - 1)] ^= 0x10
            answer.body = bytes(body)
        exchange.send(answer)

    return spoil


def slow(seconds: float) -> Spoil:
    """The answer comes late."""

    def spoil(exchange: Exchange) -> None:
        exchange.closing.wait(seconds)
        exchange.send(exchange.forward())

    return spoil


def never(exchange: Exchange) -> None:
    """No answer, and the connection stays open."""
    exchange.closing.wait(600)
    exchange.reset()


def unconditional(exchange: Exchange) -> None:
    """The server does not see the conditions, as one that knows none."""
    exchange.headers = {
        name: value for name, value in exchange.headers.items() if name.lower() not in ("if-match", "if-none-match")
    }
    exchange.send(exchange.forward())


def unmatched(exchange: Exchange) -> None:
    """The server knows If-None-Match, but not If-Match."""
    exchange.headers = {name: value for name, value in exchange.headers.items() if name.lower() != "if-match"}
    exchange.send(exchange.forward())


@dataclass(slots=True)
class _Rule:
    kinds: re.Pattern[str]
    spoil: Spoil
    skip: int
    times: float


@dataclass(eq=False)
class Proxy:
    """An S3 endpoint in front of another, that keeps what it was asked and does to it what it is told.

    Example:
        >>> with Proxy(endpoint) as proxy:
        ...     proxy.on("PUT manifest.json", lost, times=1)
        ...     ...
        ...     assert proxy.counted()["PUT manifest.json"] == 1
    """

    upstream: str
    requests: list[Request] = field(default_factory=list[Request])
    spoiled: int = 0
    """How many requests met a rule."""

    closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Proxy:
        self.behind = urlsplit(self.upstream).netloc
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def on(self, kinds: str, spoil: Spoil, *, skip: int = 0, times: float = float("inf")) -> None:
        """Spoil requests whose kind matches a regular expression: all but the first `skip`, so many `times`."""
        with self._lock:
            self._rules.append(_Rule(re.compile(kinds), spoil, skip, times))

    def clear(self) -> None:
        """Forget the rules, and what was asked so far."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()
            self.spoiled = 0

    def counted(self) -> collections.Counter[str]:
        """How many requests there were of each kind."""
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
        """Only closed: a connection that shall be reset must not be ended in order first."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news: tests do that on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = urlsplit(self.path)
        key = unquote(found.path).removeprefix(f"/{BUCKET}").lstrip("/")
        query = parse_qs(found.query)
        listing = "list-type" in query
        conditional = any(self.headers.get(name) for name in ("If-Match", "If-None-Match"))
        request = Request(
            "LIST" if listing else self.command,
            query.get("prefix", [""])[0] if listing else key,
            conditional,
            len(body),
        )
        spoil = self.server.proxy._met(request)
        exchange = Exchange(self, body)
        if spoil is None:
            exchange.send(exchange.forward())
        else:
            spoil(exchange)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """The requests are kept; nothing is printed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fresh path in an S3 bucket, reached through a proxy."""

    url: str
    proxy: Proxy

    def listed(self, below: str = "") -> list[str]:
        """The keys there are, asked of the server itself."""
        return sorted(key.decode() for key in self._open(f"{self.url}/{below}").list().result())

    def copy_from(self, source: str, url: str) -> None:
        """Copy a checkpoint key by key, with no condition and not by way of the proxy."""
        found, copy = ts.KvStore.open(f"{source}/").result(), self._open(f"{url}/")
        for key in found.list().result():
            copy.write(key, found.read(key).result().value).result()

    def _open(self, url: str) -> ts.KvStore:
        spec = {
            "driver": "s3",
            "bucket": BUCKET,
            "path": url.removeprefix(f"s3://{BUCKET}/"),
            "endpoint": self.proxy.upstream,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
        }
        return ts.KvStore.open(spec).result()


@contextlib.contextmanager
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Points s3:// URLs of this process, and of those it starts, to a proxy in front of a server."""
    with Proxy(endpoint) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield Bucket(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}", proxy)
