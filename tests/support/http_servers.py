"""HTTP servers in threads, which take the place of those of others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from tests.support.processes import join_threads, start_threads


class Handler(BaseHTTPRequestHandler):
    """Handler that logs nothing."""

    def read_json(self) -> Any:
        """Return the body of the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve in a thread, and yield the address."""
    with server:
        threads = start_threads(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            join_threads(threads)
