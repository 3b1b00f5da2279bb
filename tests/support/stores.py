"""Object stores for tests: real servers in child processes.

A server reads its standard input and exits when that closes, so it never outlives the test run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BUCKET = "checkpoints"
KEY = SECRET = "S3RVER"  # the only pair that s3rver accepts; moto accepts any pair
CACHE = Path(__file__).parents[1] / ".cache"
_TESTBENCH_AT = Path(__file__).parents[3] / "shared" / "gcs-testbench" / "start"
TESTBENCH = Path(os.environ.get("JAXCKPT_GCS_TESTBENCH", _TESTBENCH_AT))

_START_SECONDS = 60
_FIRST_START_SECONDS = 300  # the testbench creates its virtual environment

# moto checks a condition and writes in two steps, so another thread may write between them. This makes them atomic.
_MOTO = """
import logging, sys, threading, urllib.request
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
logging.disable()
put_object, one_at_a_time = S3Response.put_object, threading.Lock()
def put_alone(response):
    with one_at_a_time:
        return put_object(response)
S3Response.put_object = put_alone
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
_TESTBENCH = """
import http.client, os, signal, socket, subprocess, sys, time, urllib.request
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.argv[1], f"127.0.0.1:{port}"], stdin=subprocess.DEVNULL, start_new_session=True)
try:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).close()
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        else:
            print(port, flush=True)
            sys.stdin.read()
            break
finally:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running object store."""

    scheme: str
    """Scheme of the URLs that it serves: "s3" or "gs"."""

    endpoint: str

    def fresh_bucket(self) -> str:
        """The name of a bucket; a new one for gs://, because a client of a gs:// bucket keeps its endpoint."""
        if self.scheme == "s3":
            return BUCKET
        name = f"{BUCKET}-{uuid.uuid4().hex[:8]}"
        url, content = f"{self.endpoint}/storage/v1/b?project=p", f'{{"name": "{name}"}}'.encode()
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method="POST")
        urllib.request.urlopen(request, timeout=30).close()
        return name


def environment(scheme: str, endpoint: str) -> dict[str, str]:
    """The environment variables that direct URLs of a scheme to a server."""
    if scheme == "gs":
        return {"TENSORSTORE_GCS_HTTP_URL": endpoint, "GOOGLE_AUTH_TOKEN_FOR_TESTING": SECRET}
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """moto's S3 server, which honors conditions. It keeps everything in memory."""
    with _child([sys.executable, "-c", _MOTO, BUCKET], Path.cwd()) as endpoint:
        yield Server("s3", endpoint)


@contextlib.contextmanager
def storage_testbench() -> Iterator[Server]:
    """Google's storage testbench, which keeps everything in memory. LookupError if it is not next to the project."""
    if not TESTBENCH.exists():
        raise LookupError(f"no storage testbench is at {TESTBENCH}, so gs:// is not tried")
    CACHE.mkdir(exist_ok=True)
    with contextlib.ExitStack() as running:
        with (CACHE / "gcs-testbench.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first start creates a virtual environment
            command = [sys.executable, "-c", _TESTBENCH, str(TESTBENCH)]
            endpoint = running.enter_context(_child(command, CACHE, _FIRST_START_SECONDS))
        yield Server("gs", endpoint)


@contextlib.contextmanager
def s3rver(folder: Path) -> Iterator[Server]:
    """s3rver, which ignores conditions. LookupError if npm cannot install it."""
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
        yield Server("s3", endpoint)


@contextlib.contextmanager
def _child(command: Sequence[str], folder: Path, start_seconds: float = _START_SECONDS) -> Iterator[str]:
    child = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        # A timer kills a silent server. Its output then ends, and so does the wait for a line.
        timer = threading.Timer(start_seconds, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        assert line, f"the server did not start: {command[0]}"
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        try:
            child.communicate(timeout=10)  # closes its standard input
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
