"""S3-compatible servers that take the bucket only from the host name (virtual-hosted style); wrong settings of S3."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
import servers
import stores

import jaxckpt
from jaxckpt._store import bucket as _bucket
from jaxckpt.errors import CheckpointExistsError, InputError, StorageError

QUICK = jaxckpt.Options(storage={"retry_seconds": 2})


@pytest.fixture
def hosted(moto: stores.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Bucket]:
    """A bucket of such a server. With `--virtual-hosts`, all tests use such a one."""
    with servers.bucket(moto, monkeypatch, virtual_hosts=True) as bucket:
        yield bucket


def tree(seed: int) -> dict[str, object]:
    return {"w": jnp.full((64, 48), float(seed)), "host": np.arange(7) + seed, "step": seed}


def same(found: dict[str, object], seed: int) -> bool:
    return all(np.array_equal(np.asarray(found[name]), np.asarray(value)) for name, value in tree(seed).items())


@pytest.mark.child
@pytest.mark.parametrize("source", ["environment", "options"])
def test_everything_works_with_the_bucket_in_the_host(
    hosted: servers.Bucket, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    url, options = hosted.url, QUICK
    if source == "options":
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        options = jaxckpt.Options(storage={"retry_seconds": 2, "endpoint": hosted.proxy.endpoint})
    jaxckpt.save(f"{url}/one", tree(1), options=options)
    if source == "options":
        assert same(jaxckpt.restore(f"{url}/one", options=options), 1)
        return
    with pytest.raises(CheckpointExistsError):
        jaxckpt.save(f"{url}/one", tree(2), options=options)
    jaxckpt.save(f"{url}/one", tree(2), overwrite=True, options=options)
    assert same(jaxckpt.restore(f"{url}/one", options=options), 2)
    assert jaxckpt.verify(f"{url}/one", options=options).ok
    with jaxckpt.Checkpointer(f"{url}/run", keep_last=2, options=options) as steps:
        for step in (1, 2, 3):
            steps.save(step, tree(step), metrics={"loss": 1.0 / step})
        steps.wait()
    run = jaxckpt.Run(f"{url}/run", options=options)
    assert run.steps() == [2, 3]
    assert same(run.restore(), 3)
    assert run.metrics(3) == {"loss": 1 / 3}


@pytest.mark.child
def test_path_style_is_refused_there(hosted: servers.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", hosted.proxy.endpoint.replace("{bucket}.", ""))
    with pytest.raises(StorageError, match=r"PathStyleRequestNotAllowed.*\(HTTP 400\)"):
        jaxckpt.save(f"s3://{stores.BUCKET}/refused", tree(1), options=QUICK)


@pytest.mark.parametrize(
    ("storage", "url", "expected"),
    [
        ({"endpoint": "https://s3.example.com/{bucket}"}, "s3://checkpoints/run", r"must have \{bucket\} in its host"),
        (
            {"bucket": "other"},
            "s3://checkpoints/run",
            r"virtual-hosted style, give an endpoint such as https://\{bucket\}",
        ),
        (
            {"endpoint": "user:hidden@127.0.0.1:5599"},
            "s3://checkpoints/run",
            r"endpoint '127\.0\.0\.1:5599' must begin with http:// or https://\. It is AWS_ENDPOINT_URL_S3",
        ),
        ({}, "s3://ab/run", r"names the bucket 'ab', but names of buckets have 3 to 63"),
        ({}, "gs://ab/run", r"names the bucket 'ab', but names of buckets have 3 to 63"),
    ],
)
def test_settings_that_no_server_has(storage: dict[str, str], url: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        jaxckpt.open(url, options=jaxckpt.Options(storage=storage))
    assert "ercent" not in str(caught.value)


@pytest.mark.parametrize("setting", ["endpoint", "silent"])
def test_a_wrong_endpoint_is_warned_of_soon_and_named_in_the_error(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host does not exist, or never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        endpoint = "http://no-such-host.invalid" if setting == "endpoint" else f"http://user:hidden@127.0.0.1:{port}"
        for name, value in stores.environment("s3", endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(_bucket, "_WARNING_SECONDS", 0.3)
        with caplog.at_level(logging.WARNING, "jaxckpt"), pytest.raises(StorageError) as caught:
            jaxckpt.save("s3://checkpoints/run", {"w": 1}, options=jaxckpt.Options(storage={"retry_seconds": 1}))
    for text in (str(caught.value), caplog.text):
        assert "the endpoint is AWS_ENDPOINT_URL or Options.storage['endpoint'], the region AWS_REGION" in text
        assert "hidden" not in text
    assert caplog.text.count("Requests are retried for about Options.storage['retry_seconds']=1") == 1
    if setting == "endpoint":
        assert "no-such-host.invalid" in str(caught.value)


@pytest.mark.child
def test_a_wrong_region_and_a_missing_bucket_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Amazon answers: a redirect to the region of the bucket."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>PermanentRedirect</Code><Message>use the region of the bucket</Message></Error>"
            self.send_response(301)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in stores.environment("s3", endpoint).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StorageError, match=r"region us-east-1: the endpoint is AWS_ENDPOINT_URL"):
            jaxckpt.open("s3://checkpoints/run", options=QUICK)
        server.shutdown()


@pytest.mark.child
def test_without_credentials_a_refused_request_is_said_to_be_anonymous(
    moto: stores.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers.bucket(moto, monkeypatch) as bucket:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/does-not-exist")
        bucket.proxy.on(".*", servers.status(403, "AccessDenied"))
        with pytest.raises(StorageError, match=r"HTTP 403.*AWS_ACCESS_KEY_ID is not set.* requests are anonymous"):
            jaxckpt.open(bucket.url, options=QUICK)
