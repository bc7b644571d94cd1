"""A Hugging Face Hub for the tests: in memory, on the loopback interface, with LFS, ranges, branches and faults on
demand.

It answers the requests that `huggingface_hub` and `datasets` make when they create, push, list, load and stream a
repository. Set `HF_ENDPOINT` to `HubServer().start().url` before either is imported.
"""

import base64
import hashlib
import itertools
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


DATE = "2026-01-01T00:00:00.000Z"
PLURAL = {"models": "model", "datasets": "dataset", "spaces": "space"}
URL_PREFIX = {"model": "", "dataset": "datasets/", "space": "spaces/"}
LFS_SUFFIXES = (".parquet", ".safetensors", ".bin", ".arrow", ".pt", ".png")


@dataclass(frozen=True)
class StoredFile:
    """Content of a file and whether the Hub keeps it as an LFS object."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def entry(self, path: str) -> dict:
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": self.git_oid}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass
class Commit:
    files: dict[str, StoredFile]
    parent: str | None
    title: str


@dataclass
class Repository:
    kind: str
    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: itertools.count = field(default_factory=itertools.count)

    def commit(self, files: dict[str, StoredFile], parent: str | None, title: str) -> str:
        sha = hashlib.sha1(f"{self.kind} {self.name} {next(self._numbers)} {time.time_ns()}".encode()).hexdigest()
        self.commits[sha] = Commit(files, parent, title)
        return sha

    def resolve(self, revision: str) -> str | None:
        revision = unquote(revision)
        if revision in self.branches or revision in self.tags:
            return self.branches.get(revision) or self.tags[revision]
        if len(revision) >= 7:
            return next((sha for sha in self.commits if sha.startswith(revision)), None)
        return None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Content by path, for assertions."""
        return {path: file.content for path, file in self.commits[self.resolve(revision)].files.items()}


@dataclass
class Fault:
    """Answers `status` to the next `times` requests that match, after letting `after` of them through."""

    method: str
    pattern: str
    status: int
    times: int
    after: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if self.times <= 0 or method != self.method or not re.search(self.pattern, path):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


class HubServer:
    """The server. `requests` holds (method, path, status) of everything answered; `faults` what to break."""

    def __init__(
        self, user: str = "tester", organizations: tuple[str, ...] = ("acme",), token: str = "hf_test"
    ) -> None:
        self.user, self.organizations, self.token = user, organizations, token
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, int]] = []
        self.on_request = lambda method, path: None
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reset(self) -> None:
        """Forgets everything."""
        self.repositories.clear()
        self.objects.clear()
        self.faults.clear()
        self.requests.clear()
        self.on_request = lambda method, path: None

    def fail(self, method: str, pattern: str, status: int, times: int = 1, after: int = 0) -> None:
        self.faults.append(Fault(method, pattern, status, times, after))

    def dataset(self, name: str) -> Repository:
        return self.repositories["dataset", name]

    def create(self, kind: str, name: str, private: bool) -> Repository:
        repository = self.repositories[kind, name] = Repository(kind, name, private)
        attributes = StoredFile(b"*.parquet filter=lfs diff=lfs merge=lfs -text\n", lfs=False)
        repository.branches["main"] = repository.commit({".gitattributes": attributes}, None, "initial commit")
        return repository


class _Answered(Exception):
    """Ends a request whose answer has been sent."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    # --- answers

    def reply(self, status: int, body=b"", headers: dict | None = None, content_type: str = "application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": content_type, "Content-Length": str(len(data)), **(headers or {})}
        self.hub.requests.append((self.command, urlsplit(self.path).path, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        raise _Answered

    def refuse(self, status: int, code: str, message: str):
        self.reply(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    # --- requests

    def handle_request(self) -> None:
        self.body = self._read_body()
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.signed_in = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        try:
            self.hub.on_request(self.command, url.path)
            for fault in self.hub.faults:
                if fault.strikes(self.command, url.path):
                    self.reply(fault.status, {"error": "injected fault"})
            for pattern, method in self.ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match:
                    method(self, *match.groups())
            self.refuse(404, "NotFound", f"no route for {self.command} {url.path}")
        except _Answered:
            return

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def require_token(self) -> None:
        if not self.signed_in:
            self.refuse(401, "InvalidToken", "Invalid credentials")

    def repository(self, kind: str, name: str) -> Repository:
        repository = self.hub.repositories.get((kind, unquote(name)))
        if repository is None or (repository.private and not self.signed_in):
            self.refuse(404 if self.signed_in else 401, "RepoNotFound", "Repository not found")
        return repository

    def revision(self, repository: Repository, revision: str) -> str:
        sha = repository.resolve(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # --- routes

    def who_am_i(self):
        self.require_token()
        organizations = [
            {"type": "org", "id": name, "name": name, "roleInOrg": "admin"} for name in self.hub.organizations
        ]
        token = {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}}
        self.reply(200, {"type": "user", "id": "1", "name": self.hub.user, "fullname": self.hub.user, "isPro": False,
                         "orgs": organizations, "auth": token})  # fmt: skip

    def validate_card(self):
        self.reply(200, {"errors": [], "warnings": []})

    def create_repository(self):
        self.require_token()
        asked = self.json()
        kind, name = asked.get("type", "model"), f"{asked.get('organization') or self.hub.user}/{asked['name']}"
        url = f"{self.hub.url}/{URL_PREFIX[kind]}{name}"
        if (kind, name) in self.hub.repositories:
            self.reply(409, {"error": "You already created this repo", "url": url})
        self.hub.create(kind, name, bool(asked.get("private", asked.get("visibility") == "private")))
        self.reply(200, {"url": url, "name": name, "id": name})

    def delete_repository(self):
        self.require_token()
        asked = self.json()
        name = f"{asked.get('organization') or self.hub.user}/{asked['name']}"
        self.hub.repositories.pop((asked.get("type", "model"), name), None)
        self.reply(200, {})

    def lfs_batch(self, prefix: str, name: str):
        objects = []
        for wanted in self.json()["objects"]:
            oid = wanted["oid"]
            answer = {"oid": oid, "size": wanted["size"]}
            # No actions: the object is there and the client skips it.
            if oid not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{oid}"
                answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(answer)
        self.reply(200, {"transfer": "basic", "objects": objects}, content_type="application/vnd.git-lfs+json")

    def lfs_object(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.refuse(400, "BadRequest", "sha256 mismatch")
        self.hub.objects[oid] = self.body
        self.reply(200)

    def lfs_verify(self, oid: str):
        if oid not in self.hub.objects:
            self.refuse(404, "NotFound", "missing object")
        self.reply(200, {})

    def download(self, prefix: str, name: str, revision: str, path: str):
        repository = self.repository(PLURAL[prefix.rstrip("/")] if prefix else "model", name)
        sha = self.revision(repository, revision)
        file = repository.commits[sha].files.get(unquote(path))
        if file is None:
            self.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        tag = file.sha256 if file.lfs else file.git_oid
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "ETag": f'"{tag}"'}
        if file.lfs:
            headers |= {"X-Linked-Size": str(len(file.content)), "X-Linked-ETag": f'"{tag}"'}
        binary, size = "application/octet-stream", len(file.content)
        if self.command == "HEAD":
            self.reply(200, b"", {**headers, "Content-Length": str(size)}, binary)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self.reply(200, file.content, headers, binary)
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.reply(206, file.content[start:stop], headers, binary)

    def api(self, plural: str, name: str, rest: str | None):
        repository = self.repository(PLURAL[plural], name)
        for pattern, method in self.REPOSITORY_ROUTES:
            match = re.fullmatch(pattern, rest or "")
            if match:
                method(self, repository, *match.groups())

    def info(self, repository: Repository, revision: str | None):
        sha = self.revision(repository, revision or "main")
        files = sorted(repository.commits[sha].files.items())
        siblings = [
            {"rfilename": path, "size": len(file.content)} if "blobs" in self.query else {"rfilename": path}
            for path, file in files
        ]
        self.reply(200, {"_id": "1", "id": repository.name, "author": repository.name.split("/")[0], "sha": sha,
                         "private": repository.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0,
                         "tags": [], "lastModified": DATE, "createdAt": DATE, "siblings": siblings})  # fmt: skip

    def refs(self, repository: Repository):
        def listed(kind: str, refs: dict[str, str]) -> list[dict]:
            return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in refs.items()]

        self.reply(200, {"branches": listed("heads", repository.branches), "tags": listed("tags", repository.tags),
                         "converts": [], "pullRequests": []})  # fmt: skip

    def settings(self, repository: Repository):
        asked = self.json()
        visibility = asked.get("visibility", "private" if repository.private else "public")
        repository.private = asked.get("private", visibility == "private")
        self.reply(200, {"private": repository.private})

    def ref(self, repository: Repository, kind: str, name: str):
        refs = repository.branches if kind == "branch" else repository.tags
        name, asked = unquote(name), self.json()
        if self.command == "DELETE":
            if refs.pop(name, None) is None:
                self.refuse(404, "RevisionNotFound", "no such ref")
            self.reply(200, {})
        start = asked.get("startingPoint", "main")
        if kind == "tag":
            start, name = name, asked["tag"]
        if name in refs:
            self.reply(409, {"error": "Reference already exists"})
        refs[name] = self.revision(repository, start)
        self.reply(200, {})

    def preupload(self, repository: Repository, revision: str):
        self.require_token()
        sha = self.revision(repository, revision)
        answers = []
        for file in self.json()["files"]:
            big = file["path"].endswith(LFS_SUFFIXES) or b"\0" in base64.b64decode(file["sample"])
            old = repository.commits[sha].files.get(file["path"])
            answers.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if big else "regular",
                    "shouldIgnore": False,
                    "oid": old.git_oid if old is not None and not old.lfs else None,
                }
            )
        self.reply(200, {"files": answers, "commitOid": sha})

    def create_commit(self, repository: Repository, branch: str):
        self.require_token()
        branch = unquote(branch)
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        with repository.lock:
            if branch not in repository.branches:
                self.refuse(404, "RevisionNotFound", "Invalid rev id")
            head = repository.branches[branch]
            if header.get("parentCommit") not in (None, "", head):
                self.refuse(412, "Conflict", "A commit has happened since. Please refresh and try again.")
            files = dict(repository.commits[head].files)
            for line in lines:
                self._apply(files, line["key"], line["value"])
            sha = repository.branches[branch] = repository.commit(files, head, header["summary"])
        url = f"{self.hub.url}/{URL_PREFIX[repository.kind]}{repository.name}/commit/{sha}"
        self.reply(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def _apply(self, files: dict[str, StoredFile], key: str, value: dict) -> None:
        if key == "file":
            content = base64.b64decode(value["content"]) if value.get("encoding") == "base64" else value["content"]
            files[value["path"]] = StoredFile(content if isinstance(content, bytes) else content.encode(), lfs=False)
        elif key == "lfsFile":
            if value["oid"] not in self.hub.objects:
                self.refuse(400, "BadRequest", f"the LFS object of {value['path']} was never uploaded")
            files[value["path"]] = StoredFile(self.hub.objects[value["oid"]], lfs=True)
        elif key == "deletedFile":
            files.pop(value["path"], None)
        elif key == "deletedFolder":
            folder = value["path"].rstrip("/") + "/"
            for path in [path for path in files if path.startswith(folder)]:
                del files[path]

    def history(self, repository: Repository, revision: str):
        sha, commits = self.revision(repository, revision), []
        while sha:
            commit = repository.commits[sha]
            commits.append({"id": sha, "title": commit.title, "message": "", "authors": [{"user": self.hub.user}],
                            "date": DATE})  # fmt: skip
            sha = commit.parent
        self.reply(200, commits)

    def tree(self, repository: Repository, revision: str, folder: str | None):
        sha = self.revision(repository, revision)
        folder = unquote(folder or "").strip("/")
        prefix = f"{folder}/" if folder else ""
        recursive = self.query.get("recursive", "").lower() in ("1", "true")
        files = {path: file for path, file in sorted(repository.commits[sha].files.items()) if path.startswith(prefix)}
        if folder and not files:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist")
        entries, folders = [], set()
        for path, file in files.items():
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                parent = prefix + "/".join(parts[:depth])
                if parent not in folders:
                    folders.add(parent)
                    oid = hashlib.sha1(parent.encode()).hexdigest()
                    entries.append({"type": "directory", "path": parent, "size": 0, "oid": oid})
            if recursive or len(parts) == 1:
                entries.append(file.entry(path))
        if self.query.get("expand", "").lower() in ("1", "true"):
            for entry in entries:
                entry["lastCommit"] = {"id": sha, "title": repository.commits[sha].title, "date": DATE}
        self.reply(200, entries)

    def paths_info(self, repository: Repository, revision: str):
        files = repository.commits[self.revision(repository, revision)].files
        as_json = "json" in (self.headers.get("Content-Type") or "")
        paths = (self.json() if as_json else parse_qs(self.body.decode())).get("paths", [])
        entries = []
        for path in [paths] if isinstance(paths, str) else paths:
            path = path.strip("/")
            if path in files:
                entries.append(files[path].entry(path))
            elif any(name.startswith(path + "/") for name in files):
                entries.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        self.reply(200, entries)

    def super_squash(self, repository: Repository, branch: str):
        branch = unquote(branch)
        files = repository.commits[repository.branches[branch]].files
        repository.branches[branch] = repository.commit(files, None, self.json().get("message") or "squash")
        self.reply(200, {})

    def auth_check(self, repository: Repository):
        self.reply(200, {})

    NAME = r"([^/]+/[^/]+)"
    ROUTES = (
        (r"/api/whoami-v2", who_am_i),
        (r"/api/validate-yaml", validate_card),
        (r"/api/repos/create", create_repository),
        (r"/api/repos/delete", delete_repository),
        (r"/(datasets/|spaces/|)" + NAME + r"\.git/info/lfs/objects/batch", lfs_batch),
        (r"/lfs/([0-9a-f]{64})/verify", lfs_verify),
        (r"/lfs/([0-9a-f]{64})", lfs_object),
        (r"/(datasets/|spaces/|)" + NAME + r"/resolve/([^/]+)/(.+)", download),
        (r"/api/(models|datasets|spaces)/" + NAME + r"(?:/(.*))?", api),
    )
    REPOSITORY_ROUTES = (
        (r"(?:revision/(.+))?", info),
        (r"refs", refs),
        (r"settings", settings),
        (r"(branch|tag)/(.+)", ref),
        (r"preupload/([^/]+)", preupload),
        (r"commit/([^/]+)", create_commit),
        (r"commits/([^/]+)", history),
        (r"tree/([^/]+)(?:/(.*))?", tree),
        (r"paths-info/([^/]+)", paths_info),
        (r"super-squash/(.+)", super_squash),
        (r"auth-check", auth_check),
    )
