"""s3://, http(s):// and hub sources against local servers."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy.secrets import Secret, find_secret
from stoker.deploy.sources import hub, resolve, s3
from stoker.deploy.sources.store import Store

Reply = tuple[int, dict[str, str], bytes]


def tar_bytes(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    # without the time in the gzip header, so that all test workers have the same digest
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, str, Any], Reply]], str]]:
    """Start a server that responds with a function of (method, path, headers); returns its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[str, str, Any], Reply]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, body = reply(self.command, self.path, self.headers)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                return None

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": moto}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # moto's buckets belong to the process, in which tests of another folder may have used the same names.
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")).close()
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    return client


def put(client: Any, **objects: bytes) -> None:
    for key, data in objects.items():
        client.put_object(Bucket="models", Key=key, Body=data)


def test_s3_prefix(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"llama/config.json": b"{}", "llama/sub/w.safetensors": b"123", "llama/": b"", "llama-2/other": b"x", "llama/empty": b""})
    done: list[tuple[int, int | None]] = []
    folder = resolve("s3://models/llama", cache=tmp_path, progress=lambda name, count, total: done.append((count, total)))
    assert files(folder) == {"config.json": b"{}", "sub/w.safetensors": b"123", "empty": b""}
    assert max(done) == (5, 5)
    assert resolve("s3://models/llama/", cache=tmp_path) == folder


def test_s3_is_fetched_again_only_after_a_change(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"again/config.json": b"1"})
    first = resolve("s3://models/again", cache=tmp_path)
    put(bucket, **{"again/config.json": b"2"})
    second = resolve("s3://models/again", cache=tmp_path)
    assert files(first) == {"config.json": b"1"} and files(second) == {"config.json": b"2"}


def test_s3_large_objects_are_fetched_in_ranges(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 400
    monkeypatch.setattr(s3, "_PART", 1000)
    put(bucket, **{"parts/a": data, "parts/b": data[::-1]})
    assert files(resolve("s3://models/parts", cache=tmp_path)) == {"a": data, "b": data[::-1]}


def test_s3_archive(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"m/model.tar.gz": tar_bytes(**{"model/config.json": b"{}"}), "m/model.tar.gz.sig": b"x"})
    assert files(resolve("s3://models/m/model.tar.gz", cache=tmp_path)) == {"config.json": b"{}"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp")]


MISSING = [("s3://models/none", "s3://models/none has no objects"), ("s3://nobucket/x", "s3://nobucket/x does not exist")]


@pytest.mark.parametrize("address, match", MISSING)
def test_s3_missing(bucket: Any, tmp_path: Path, address: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        resolve(address, cache=tmp_path)
    assert "hunter2" not in str(caught.value)


def test_s3_size_limit(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"big/a": b"1" * 600, "big/b": b"1" * 600})
    with pytest.raises(CheckpointError, match="the limit is"):
        resolve("s3://models/big", cache=tmp_path, max_bytes=1000)


def test_s3_key_outside_the_folder(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"esc/../../evil": b"1"})
    with pytest.raises(CheckpointError, match="would be outside its folder"):
        resolve("s3://models/esc", cache=tmp_path)


def test_s3_key_that_is_also_a_folder(bucket: Any, tmp_path: Path) -> None:
    put(bucket, **{"both/a": b"1", "both/a/b": b"2"})
    with pytest.raises(CheckpointError, match="cannot be a file"):
        resolve("s3://models/both", cache=tmp_path)


class ChangingClient:
    """A client whose objects differ from the listing."""

    def __init__(self, client: Any, change: Callable[[dict], dict]) -> None:
        self._client, self._change = client, change
        self.get_paginator = client.get_paginator

    def get_object(self, **arguments: Any) -> dict:
        return self._change(self._client.get_object(**arguments))


class Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        yield self._data


@pytest.mark.parametrize("data", [b"12", b"123456789"])
def test_s3_object_of_another_length(bucket: Any, tmp_path: Path, data: bytes) -> None:
    put(bucket, **{"short/w": b"12345"})
    store = Store(tmp_path, 1 << 30, lambda *report: None)
    with pytest.raises(CheckpointError, match=r"s3://models/short/w is truncated"):
        s3.fetch("models/short", store, ChangingClient(bucket, lambda response: response | {"Body": Body(data)}))
    assert not [p for p in (tmp_path / "s3").iterdir() if p.is_dir()]


def test_s3_object_that_is_deleted_or_changed_meanwhile(bucket: Any, tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, lambda *report: None)
    put(bucket, **{"gone/w": b"12345"})
    source = s3._Source(bucket, "models", "gone", store)
    objects = source.objects()
    put(bucket, **{"gone/w": b"54321"})
    with pytest.raises(CheckpointError, match="gone/w changed while it was fetched"):
        source.download(objects, tmp_path / "one")
    bucket.delete_object(Bucket="models", Key="gone/w")
    with pytest.raises(CheckpointError, match="gone/w does not exist"):
        source.download(objects, tmp_path / "two")


def test_s3_connection_cut(serve: Any, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>'
        b'<Contents><Key>p/w</Key><Size>100</Size><ETag>"e"</ETag></Contents></ListBucketResult>'
    )

    def reply(method: str, path: str, headers: Any) -> Reply:
        return (200, {}, listing) if "list-type" in path else (206, {"Content-Length": "100", "Connection": "close"}, b"only this")

    monkeypatch.setenv("AWS_ENDPOINT_URL", serve(reply))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(CheckpointError, match="s3://models/p/w is truncated"):
        resolve("s3://models/p", cache=tmp_path)


def test_s3_refused(serve: Any, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    monkeypatch.setenv("AWS_ENDPOINT_URL", serve(lambda *request: (403, {}, denied)))
    with pytest.raises(CheckpointError, match=r"s3://models/p is refused \(AccessDenied\)") as caught:
        resolve("s3://models/p", cache=tmp_path)
    assert "hunter2" not in str(caught.value)


ARCHIVE = tar_bytes(**{"model/config.json": b"{}"})
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()


def test_http_archive_is_stored_by_digest(serve: Any, tmp_path: Path) -> None:
    paths: list[str] = []

    def reply(method: str, path: str, headers: Any) -> Reply:
        paths.append(path)
        return 200, {}, ARCHIVE

    address = f"{serve(reply)}/model.tar.gz"
    folder = resolve(f"{address}#sha256={DIGEST}", cache=tmp_path)
    assert files(folder) == {"config.json": b"{}"}
    assert resolve(address, digest=DIGEST, cache=tmp_path) == folder and paths == ["/model.tar.gz"]


@pytest.mark.parametrize(
    "status, headers, body, match",
    [
        (404, {}, b"", "the server responded with status 404"),
        (200, {"Content-Length": str(len(ARCHIVE) + 10), "Connection": "close"}, ARCHIVE, "truncated|cannot be fetched"),
        (200, {}, ARCHIVE + b"x", "has sha256 "),
        (302, {"Location": "file:///etc/passwd"}, b"", "cannot be fetched"),
    ],
)
def test_http_failures(serve: Any, tmp_path: Path, status: int, headers: dict, body: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        resolve(f"{serve(lambda *request: (status, headers, body))}/m.tar.gz#sha256={DIGEST}", cache=tmp_path)


def test_http_body_without_length_is_limited(serve: Any, tmp_path: Path) -> None:
    address = serve(lambda *request: (200, {"Content-Length": "invalid", "Connection": "close"}, b"0" * 5000))
    with pytest.raises(CheckpointError, match="the limit is"):
        resolve(f"{address}/m.tar.gz", digest=DIGEST, cache=tmp_path, max_bytes=1000)


@pytest.mark.parametrize(
    "address, match",
    [
        ("https://h/m.tar.gz", "needs its sha256"),
        ("https://h/m.tar.gz#sha256=12", "needs its sha256"),
        (f"https://h/m.zip#sha256={DIGEST}", "does not end in .tar"),
        (f"https://u:hunter2@h/m.tar#sha256={DIGEST}", "credential"),
        (f"https://h/m.tar?token=hunter2#sha256={DIGEST}", "credential"),
    ],
)
def test_http_addresses(tmp_path: Path, address: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        resolve(address, cache=tmp_path)
    assert "hunter2" not in str(caught.value)


COMMIT = "a" * 40
TREE = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"x",
    "tokenizer.json": b"tok",
}


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def hub_reply(method: str, path: str, headers: Any) -> Reply:
    if headers.get("authorization") != "Bearer hf_hunter2":
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
    path = path.partition("?")[0]
    if path.startswith("/api/models/org/model/tree/"):
        tree = [{"type": "file", "path": name, "size": len(data), "oid": sha1(data)} for name, data in TREE.items()]
        return 200, {}, json.dumps(tree).encode()
    if path in ("/api/models/org/model", "/api/models/org/model/revision/main", f"/api/models/org/model/revision/{COMMIT}"):
        siblings = [{"rfilename": name, "size": len(data)} for name, data in TREE.items()]
        return 200, {}, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode()
    if path.startswith("/api/models/org/model/revision/"):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if path.startswith("/api/models/org/gated"):
        return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
    name = path.removeprefix(f"/org/model/resolve/{COMMIT}/")
    if name in TREE:
        return 200, {"ETag": f'"{sha1(TREE[name])}"', "X-Repo-Commit": COMMIT}, TREE[name]
    return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


@pytest.fixture
def hub_server(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    address = serve(hub_reply)
    point_hub_to(address, tmp_path, monkeypatch)
    return address


def point_hub_to(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    cache, token = str(folder / "hub"), str(folder / "token")
    for name, value in {"ENDPOINT": address, "HF_HUB_CACHE": cache, "HF_TOKEN_PATH": token, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.delenv("HF_TOKEN", raising=False)


QUANTIZED = {"README.md": b"r", "m.Q4_K_M.gguf": b"four", "m.Q4_K_S.gguf": b"small", "m.Q8_0.gguf": b"eight", "mmproj-m.gguf": b"vision"}


def gguf_reply(method: str, path: str, headers: Any) -> Reply:
    path = path.partition("?")[0]
    if path.startswith("/api/models/org/quantized/tree/"):
        tree = [{"type": "file", "path": name, "size": len(data), "oid": sha1(data)} for name, data in QUANTIZED.items()]
        return 200, {}, json.dumps(tree).encode()
    if path.startswith("/api/models/org/quantized"):
        siblings = [{"rfilename": name, "size": len(data)} for name, data in QUANTIZED.items()]
        return 200, {}, json.dumps({"id": "org/quantized", "sha": COMMIT, "siblings": siblings}).encode()
    data = QUANTIZED[path.removeprefix(f"/org/quantized/resolve/{COMMIT}/")]
    return 200, {"ETag": f'"{sha1(data)}"', "X-Repo-Commit": COMMIT}, data


@pytest.mark.parametrize("location", ["org/quantized:Q4_K_M", "hf://org/quantized:q4_k_m@main", "org/quantized:m.Q4_K_M.gguf"])
def test_one_gguf_file_of_a_hub_repository(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    point_hub_to(serve(gguf_reply), tmp_path, monkeypatch)
    reports: list[tuple[int, int | None]] = []
    file = resolve(location, cache=tmp_path / "c", progress=lambda name, done, total: reports.append((done, total)))
    assert (file.name, file.read_bytes()) == ("m.Q4_K_M.gguf", b"four")
    assert reports[-1] == (4, 4) and sorted(path.name for path in file.parent.iterdir()) == ["m.Q4_K_M.gguf"]
    point_hub_to("http://127.0.0.1:1", tmp_path, monkeypatch)
    assert resolve(location, cache=tmp_path / "c") == file  # without the hub


def test_all_parts_of_a_split_gguf_file_are_fetched(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"m.Q3_K_L-0000{i}-of-00002.gguf": f"part {i}".encode() for i in (1, 2)}
    for name, data in parts.items():
        monkeypatch.setitem(QUANTIZED, name, data)
    point_hub_to(serve(gguf_reply), tmp_path, monkeypatch)
    file = resolve("org/quantized:Q3_K_L", cache=tmp_path / "c")
    assert file.name == "m.Q3_K_L-00001-of-00002.gguf"
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == parts


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("", r"org/quantized has 3 GGUF files: m\.Q4_K_M\.gguf, m\.Q4_K_S\.gguf, m\.Q8_0\.gguf\. Name one, such as org/quantized:Q4_K_M"),
        (":Q5_K_M", "org/quantized has no GGUF files named Q5_K_M: m.Q4_K_M.gguf, "),
        (":Q4_K", "org/quantized has no GGUF files named Q4_K: "),
        (":m", "org/quantized has 3 GGUF files named m: "),
    ],
)
def test_a_gguf_file_that_is_not_named_clearly(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, message: str
) -> None:
    point_hub_to(serve(gguf_reply), tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        resolve(f"org/quantized{variant}", cache=tmp_path)


TOKEN = Secret("hf_hunter2")


@pytest.mark.parametrize("location", ["org/model", "hf://org/model@main"])
def test_hub_private_repository_by_token(hub_server: str, tmp_path: Path, location: str) -> None:
    done: list[int] = []
    folder = resolve(location, token=TOKEN, cache=tmp_path / "c", progress=lambda name, count, total: done.append(count))
    assert files(folder).keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert done and done[-1] == sum(len(TREE[name]) for name in files(folder))


@pytest.mark.parametrize(
    "location, revision, token, match",
    [
        ("org/model", None, None, "does not exist, or is private. .*set HF_TOKEN"),
        ("org/model", None, Secret("hf_wrong"), "does not exist, or is private. The token has no access"),
        ("org/other", None, TOKEN, "org/other does not exist"),
        ("org/gated", None, TOKEN, "gated"),
        ("org/model", "nope", TOKEN, "org/model has no revision nope"),
    ],
)
def test_hub_refusals(hub_server: str, tmp_path: Path, location: str, revision: str | None, token: Secret | None, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        resolve(location, revision=revision, token=token, cache=tmp_path)
    assert "hf_" not in str(caught.value)


def test_hub_offline_uses_its_cache(hub_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("org/model", token=TOKEN, cache=tmp_path / "c")
    point_hub_to("http://127.0.0.1:1", tmp_path, monkeypatch)
    for revision in (COMMIT, "main", None):
        assert resolve("org/model", revision=revision, token=TOKEN, cache=tmp_path / "c") == folder


def test_hub_offline_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_hub_to("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=r"hub cannot be reached for org/model .*Name a local directory or s3://") as caught:
        resolve("org/model", token=TOKEN, cache=tmp_path)
    assert "hunter2" not in str(caught.value)


def test_secrets_are_found_by_name_and_never_printed(tmp_path: Path) -> None:
    (tmp_path / "hf_access_token").write_text("hunter2\n")
    secret = find_secret("hf_access_token", {"TRUSS_SECRET_hf_access_token": "other"}, tmp_path)
    assert secret is not None and secret.reveal() == "hunter2"
    assert "hunter2" not in f"{secret!r} {secret}"
    by_variable = find_secret("hf_access_token", {"TRUSS_SECRET_hf_access_token": "v1", "HF_TOKEN": "v2"}, tmp_path / "none")
    by_hub = find_secret("hf_access_token", {"HF_TOKEN": "v2"}, tmp_path / "none")
    assert by_variable and by_hub and (by_variable.reveal(), by_hub.reveal()) == ("v1", "v2")
    assert find_secret("my_key", {"HF_TOKEN": "v2"}, tmp_path / "none") is None


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b", "", "x" * 65, "hf token"])
def test_secret_names_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of a secret is refused"):
        find_secret(name, {}, tmp_path)


def test_files_that_are_not_fetched() -> None:
    assert "*.bin" in hub._ignored(["a.safetensors"]) and "*.bin" not in hub._ignored(["pytorch_model.bin"])
    assert "*.gguf" in hub._ignored(["a.safetensors", "a.gguf"]) and "*.gguf" not in hub._ignored(["a.gguf"])
