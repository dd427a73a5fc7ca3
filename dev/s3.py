"""A small S3 client: the few calls that the tooling and the tests make, signed with SigV4."""

from __future__ import annotations

import hashlib
import hmac
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import datetime, timezone

REGION = "us-east-1"


class S3Error(Exception):
    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


@dataclass(frozen=True)
class S3Client:
    endpoint: str
    access_key: str
    secret_key: str

    def create_bucket(self, bucket: str) -> None:
        self.request("PUT", f"/{bucket}")

    def get(self, bucket: str, key: str) -> bytes:
        return self.request("GET", f"/{bucket}/{key}")

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.request("PUT", f"/{bucket}/{key}", body=body)

    def delete(self, bucket: str, key: str) -> None:
        self.request("DELETE", f"/{bucket}/{key}")

    def list(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """Keys under a prefix with their sizes in bytes."""
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix}
        while True:
            tree = ElementTree.fromstring(self.request("GET", f"/{bucket}", query))
            namespace = tree.tag.partition("}")[0] + "}" if tree.tag.startswith("{") else ""
            for entry in tree.iter(f"{namespace}Contents"):
                found[entry.findtext(f"{namespace}Key")] = int(entry.findtext(f"{namespace}Size"))
            token = tree.findtext(f"{namespace}NextContinuationToken")
            if not token:
                return found
            query["continuation-token"] = token

    def request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        path = urllib.parse.quote(path)
        query_text = "&".join(
            f"{urllib.parse.quote(k, safe='')}={urllib.parse.quote(v, safe='')}"
            for k, v in sorted((query or {}).items())
        )
        url = f"{self.endpoint}{path}" + (f"?{query_text}" if query_text else "")
        headers = self._signed_headers(method, path, query_text, body)
        call = urllib.request.Request(url, data=body or None, method=method, headers=headers)
        # No proxy from the environment: the endpoint is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(call, timeout=30) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise S3Error(error.code, error.read().decode(errors="replace")) from None

    def _signed_headers(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{now[:8]}/{REGION}/s3/aws4_request"
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "host": urllib.parse.urlsplit(self.endpoint).netloc,
            "x-amz-content-sha256": digest,
            "x-amz-date": now,
        }
        names = ";".join(headers)
        canonical = "\n".join(
            [method, path, query, *(f"{k}:{v}" for k, v in headers.items()), "", names, digest]
        )
        to_sign = "\n".join(
            ["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()]
        )
        key = f"AWS4{self.secret_key}".encode()
        for part in (now[:8], REGION, "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        if body:
            headers["content-type"] = "application/octet-stream"
        return headers
