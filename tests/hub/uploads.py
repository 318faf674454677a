"""Writing to the local hub: accounts, new repositories, preuploaded files, commits."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import urllib.parse
from typing import Any

from tests.hub.repos import Account, Repo, Request, git_hash, sha256

LFS_SUFFIXES = (".safetensors", ".png", ".gguf")
REPO = r"(?P<repo>[^/]+/[^/]+)"
STEPS = {
    "create": re.compile("/api/repos/create"),
    "validate": re.compile("/api/validate-yaml"),
    "branch": re.compile(f"/api/models/{REPO}/branch/(?P<revision>.+)"),
    "preupload": re.compile(f"/api/models/{REPO}/preupload/(?P<revision>.+)"),
    "batch": re.compile(rf"/{REPO}\.git/info/lfs/objects/batch"),
    "put": re.compile("/put/(?P<sha256>[0-9a-f]{64})"),
    "commit": re.compile(f"/api/models/{REPO}/commit/(?P<revision>.+)"),
}
OPEN = ("validate", "put")  # need no token: the URL of a put is secret
FORBIDDEN = "You don't have the rights to create a model under the namespace"


class Uploads:
    """The request handler for uploads. faults: by the names of STEPS, or whoami."""

    def note(self, path: str) -> str:
        """Record the request and return its path, unquoted."""
        path = urllib.parse.unquote(path)
        who = self.headers.get("Authorization")
        self.asked = Request(self.command, path, self.headers.get("Host", ""), who)
        self.hub.requests.append(self.asked)
        return path

    @property
    def account(self) -> Account | None:
        token = (self.asked.authorization or "").removeprefix("Bearer ")
        return self.hub.accounts.get(token)

    def is_known(self) -> bool:
        return self.asked.authorization is None or not self.hub.accounts or self.account is not None

    def role_for(self, repo: str) -> str | None:
        return self.account.role_in(repo.split("/")[0]) if self.account is not None else None

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.asked.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def say_who(self) -> None:
        fault = self.hub.faults.get("whoami")
        if fault is not None and fault.hangs_at is not None:
            self.hub.go_on.wait()
        if fault is not None and fault.statuses:
            self.fail(fault.statuses.pop(0))
        elif self.account is None:
            self.fail(401, message="Invalid credentials in Authorization header")
        else:
            account = self.account
            orgs = [{"name": name, "roleInOrg": role} for name, role in account.orgs.items()]
            token = {"displayName": "a token", "role": account.role}
            self.answer({"name": account.name, "orgs": orgs, "auth": {"accessToken": token}})

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        path = self.note(urllib.parse.urlsplit(self.path).path)
        matches = {name: pattern.fullmatch(path) for name, pattern in STEPS.items()}
        step, found = next(((n, m) for n, m in matches.items() if m), ("", None))
        fault = self.hub.faults.get(step)
        if fault is not None and fault.cuts:
            self.rfile.read(min(fault.cuts.pop(0), int(self.headers["Content-Length"])))
            self.hang_up()
            return
        self.asked.body = self.rfile.read(int(self.headers["Content-Length"]))
        repo = found["repo"] if found and "repo" in found.groupdict() else None
        if fault is not None and fault.statuses:
            self.fail(fault.statuses.pop(0))
        elif found is None:
            self.fail(404)
        elif step not in OPEN and (self.asked.authorization is None or not self.is_known()):
            self.fail(401, message="Invalid credentials in Authorization header")
        elif repo is not None and repo not in self.hub.repos:
            self.fail(404, "RepoNotFound")
        elif repo is not None and self.role_for(repo) != "write":
            self.fail(403, message="you may only read this repo")
        else:
            getattr(self, f"do_{step}")(found)
            if fault is not None and fault.loses_answer:
                self.hub.faults.pop(step)

    def hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_create(self, found: re.Match[str]) -> None:
        asked = json.loads(self.asked.body)
        repo = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{repo}"
        if repo in self.hub.repos:
            self.answer({"error": "You already created this model repo", "url": url}, 409)
        elif self.role_for(repo) != "write":
            self.fail(403, message=f'{FORBIDDEN} "{asked["organization"]}"')
        else:
            private = asked.get("visibility") == "private"
            sha = hashlib.sha1(repo.encode()).hexdigest()
            made = Repo({".gitattributes": b""}, sha=sha, private=private)
            self.hub.repos[repo] = made
            self.answer({"url": url})

    def do_validate(self, found: re.Match[str]) -> None:
        text = json.loads(self.asked.body)["content"]
        faults = [] if text.startswith("---\n") else [{"message": "empty or missing yaml metadata"}]
        self.answer({"errors": [], "warnings": faults})

    def do_branch(self, found: re.Match[str]) -> None:
        repo = self.hub.repos[found["repo"]]
        if found["revision"] in repo.branches:
            self.fail(409)
        else:
            head = Repo(dict(repo.files), sha=repo.sha, private=repo.private)
            repo.branches[found["revision"]] = head
            self.answer({})

    def do_preupload(self, found: re.Match[str]) -> None:
        files = self.hub.repos[found["repo"]].at(found["revision"]).files
        answers = []
        for file in json.loads(self.asked.body)["files"]:
            path = file["path"]
            large = path.endswith(LFS_SUFFIXES)
            oid = (sha256 if large else git_hash)(files[path]) if path in files else None
            mode = "lfs" if large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": answers})

    def do_batch(self, found: re.Match[str]) -> None:
        objects = []
        for asked in json.loads(self.asked.body)["objects"]:
            described = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.large:
                address = f"http://localhost:{self.hub.port}/put/{asked['oid']}"
                described["actions"] = {"upload": {"href": address, "header": {}}}
            objects.append(described)
        self.answer({"transfer": "basic", "objects": objects})

    def do_put(self, found: re.Match[str]) -> None:
        if sha256(self.asked.body) != found["sha256"]:
            self.fail(400)
            return
        self.hub.large[found["sha256"]] = self.asked.body
        self.answer({})

    def do_commit(self, found: re.Match[str]) -> None:
        """Apply all files of the commit, or none."""
        repo = self.hub.repos[found["repo"]]
        head = repo.at(found["revision"])
        lines = [json.loads(line) for line in self.asked.body.splitlines()]
        header, files = lines[0]["value"], dict(head.files)
        if header.get("parentCommit", head.sha) != head.sha:
            self.fail(412, message="A commit has happened since. Please refresh and try again.")
            return
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        head.files = files
        head.messages.append(header["summary"])
        head.sha = hashlib.sha1(self.asked.body + head.sha.encode()).hexdigest()
        fault = self.hub.faults.get("commit")
        if fault is not None and fault.loses_answer:
            self.hang_up()
            return
        url = f"{self.hub.url}/{found['repo']}/commit/{head.sha}"
        self.answer({"commitUrl": url, "commitOid": head.sha, "pullRequestUrl": None})
