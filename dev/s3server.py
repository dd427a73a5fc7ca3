"""A private S3 server (SeaweedFS) on free loopback ports, with generated credentials."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dev import process
from dev.paths import dev_dir, service_directory, write_private
from dev.s3 import REGION, S3Client, S3Error
from dev.tools import ensure_s3_server


class S3Server:
    """One server; its state (pid, ports, keys) lies in `directory`, so that any process finds it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._state_file = directory / "state.json"
        self._state = json.loads(self._state_file.read_text()) if self._state_file.exists() else {}

    @property
    def credentials_file(self) -> Path:
        """In the format of ~/.aws/credentials, readable by the service user alone."""
        return self.directory / "credentials"

    @property
    def running(self) -> bool:
        return process.alive(self._state.get("pid"), str(self.directory))

    @property
    def pid(self) -> int:
        return self._state["pid"]

    @property
    def port(self) -> int:
        return self._state["port"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def access_key(self) -> str:
        return self._state["access_key"]

    @property
    def secret_key(self) -> str:
        return self._state["secret_key"]

    def client(self, endpoint: str | None = None) -> S3Client:
        return S3Client(endpoint or self.endpoint, self.access_key, self.secret_key)

    def client_environment(self) -> dict[str, str]:
        """How a program finds the server, and its keys."""
        return {
            "POLIGN_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
        }

    def start(self, bucket: str | None = None) -> None:
        """Starts the server, waits until it serves signed requests, and creates `bucket` if given."""
        if not self.running:
            self._launch()
        if bucket:
            self._until_served(lambda: self.client().create_bucket(bucket))

    def stop(self) -> None:
        # SIGTERM makes the volume server linger for ten seconds; SIGINT is no faster. The files are
        # throw-away and written through, so the server is told once and then killed.
        process.end(self._state.get("pid"), str(self.directory), signal.SIGTERM, seconds=2)

    def _launch(self) -> None:
        program = ensure_s3_server()
        service_directory(self.directory)
        data = service_directory(self.directory / "data")
        self._state.setdefault("access_key", secrets.token_hex(10).upper())
        self._state.setdefault("secret_key", secrets.token_urlsafe(30))
        write_private(
            self.credentials_file,
            "[default]\n"
            f"aws_access_key_id = {self.access_key}\n"
            f"aws_secret_access_key = {self.secret_key}\n",
        )
        config = self.directory / "s3.json"
        write_private(config, json.dumps({"identities": [{
            "name": "polign",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }]}))
        names = ["s3", "s3.grpc", "master", "master.grpc", "filer", "filer.grpc", "volume", "volume.grpc"]
        ports = dict(zip(names, process.free_ports(len(names)), strict=True))
        if "port" in self._state and process.port_free(self.port):
            ports["s3"] = self.port  # an endpoint stays what it was over a restart
        self._state["port"] = ports["s3"]
        flags = [
            f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-volume.max=100",
            "-volume.preStopSeconds=0", f"-s3.config={config}", "-s3.iam=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-filer.localSocket={self.directory}/filer.sock", f"-s3.localSocket={self.directory}/s3.sock",
        ]
        for name, port in ports.items():
            server, _, grpc = name.partition(".")
            flags.append(f"-{server}.port{'.grpc' if grpc else ''}={port}")
        self._state["pid"] = process.spawn(
            [program, "-logtostderr=true", "server", *flags], self.directory / "log", self.directory
        )
        write_private(self._state_file, json.dumps(self._state))
        self._until_served(lambda: self.client().request("GET", "/"))

    def _until_served(self, call) -> None:
        def served() -> bool:
            if not self.running:
                raise RuntimeError(f"the S3 server ended at once; see {self.directory / 'log'}")
            try:
                call()
                return True
            except S3Error as error:
                return error.status == 409  # the bucket exists already
            except OSError:
                return False

        process.wait_until(served, 60, f"the S3 server does not answer (see {self.directory / 'log'})", 0.1)


@contextmanager
def throwaway_s3_server() -> Iterator[S3Server]:
    """A server that is stopped, and its data removed, at the end of the `with` block."""
    directory = Path(tempfile.mkdtemp(prefix="s3-", dir=dev_dir()))
    directory.chmod(0o755)
    server = S3Server(directory / "s3")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
