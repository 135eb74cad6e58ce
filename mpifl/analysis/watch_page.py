"""Serves the state that `watch` reads to a browser on this machine: a page, its data and its scripts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from mpifl.core.errors import UserError

from .watch import Seen, SeenCases, as_json

HOST = "127.0.0.1"  # reachable from this machine only; ssh -L forwards pages of other machines
NAMES = (HOST, "localhost")  # allowed Host headers; other names that resolve to this host are refused
PAGES = Path(__file__).with_name("report_page")
POLICY = "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
POLICY += "connect-src 'self'; img-src data: blob:"
FILES = {  # path -> file, type
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/plotly.js": ("plotly-cartesian.min.js", "text/javascript; charset=utf-8"),
}


def server(see: Callable[[str], Seen | SeenCases | None], port: int = 0) -> ThreadingHTTPServer:
    """Return a server that accepts connections from this machine only; call its `serve_forever`.

    Args:
        see: returns the state to show, of the whole folder for an empty name, of a case for its title; None
            if there is no such case.
        port: port to listen on; 0 takes a free one.

    Raises:
        UserError: the port is in use or not permitted.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version = "mpifl"

        def do_GET(self) -> None:
            """Answer a request."""
            asked = urlsplit(self.path)
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in NAMES:
                self.send_error(HTTPStatus.FORBIDDEN, "ask as localhost")
            elif asked.path in FILES:
                name, kind = FILES[asked.path]
                self.answer((PAGES / name).read_bytes(), kind, keep=name.startswith("plotly"))
            elif asked.path == "/data.json":
                found = see(parse_qs(asked.query).get("case", [""])[0])
                if found is None:
                    self.send_error(HTTPStatus.NOT_FOUND, "there is no such case")
                else:
                    self.answer(as_json(found).encode(), "application/json")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def answer(self, content: bytes, kind: str, keep: bool = False) -> None:
            """Send an answer, which the browser may cache if `keep` is true."""
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "max-age=86400" if keep else "no-store")
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because the terminal shows the address."""

    try:
        found = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        remedy = f"cannot be listened on ({error}); give another, or leave it out for a free one"
        raise UserError("--port", port, remedy) from error
    found.daemon_threads = True
    return found


def serve(see: Callable[[str], Seen | SeenCases | None], port: int, say: Callable[[str], object]) -> int:
    """Serve the page until Ctrl-C is pressed; return the exit code.

    Args:
        see: see `server`.
        port: port to listen on; 0 takes a free one.
        say: prints a line with the address.
    """
    with server(see, port) as found:
        say(f"http://localhost:{found.server_address[1]}  (Ctrl-C ends this page, not the run)")
        with suppress(KeyboardInterrupt):
            found.serve_forever()
    return 0
