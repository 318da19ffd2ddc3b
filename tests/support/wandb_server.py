"""A server that answers W&B's client as far as it asks, until the client itself asks for an outage."""

import gzip
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "proof", "entity": {"id": "e", "name": "me"}}


def answer_query(name: str, variables: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The data of a GraphQL query by its name; an error for those that a run can do without."""
    bucket = {"id": "b", "name": variables.get("name"), "displayName": "run", "project": PROJECT}
    files = [{"name": file, "uploadUrl": f"{url}/upload"} for file in variables.get("files", ())]
    answers = {
        "Viewer": {"viewer": {"id": "v", "entity": "me", "flags": "{}", "username": "me", "teams": {"edges": []}}},
        "RunResumeStatus": {"model": {**PROJECT, "bucket": None}},
        "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}},
    }
    return {"data": answers[name]} if name in answers else {"errors": [{"message": "unknown"}]}


@contextmanager
def serve_wandb(outage: str) -> Iterator[str]:
    """Serve at the URL that is yielded, until someone gets `/outage`. outage: "refuses", "hangs" or "fails" then."""
    is_out, is_over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if is_out.is_set():
                self.fail()
                return
            answer: dict[str, Any] = {}
            if self.path == "/graphql":
                query = json.loads(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                answer = answer_query(str(query.get("operationName")), query.get("variables") or {}, url)
            self.reply(200, json.dumps(answer).encode())

        do_PUT = do_POST

        def do_GET(self) -> None:
            if self.path == "/outage":
                self.reply(200, b"")
                is_out.set()
            else:
                self.do_POST()

        def fail(self) -> None:
            if outage == "hangs":
                is_over.wait()
            elif outage == "fails":
                self.reply(500, b"")
            self.close_connection = True

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
