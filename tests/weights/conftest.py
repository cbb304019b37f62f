"""An S3 server (moto) in a separate process, accessed over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BUCKET = "roq-weights"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://roq-weights`` is an empty bucket on a local server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with (tmp_path_factory.mktemp("s3") / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log, stderr=log, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "moto's server did not start"
                assert time.monotonic() < deadline, "moto's server did not answer within 60 s"
                time.sleep(0.1)
        yield environment
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; this process and those it starts reach it."""
    import s3fs

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    if fs.exists(BUCKET):
        fs.rm(BUCKET, recursive=True)
    fs.mkdir(BUCKET)
    yield f"s3://{BUCKET}"
    s3fs.S3FileSystem.clear_instance_cache()
