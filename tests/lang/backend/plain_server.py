"""A server with pages: what a compatible one says of itself, and one answer to whatever is posted."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def server(pages, posted=None):
    """A server that answers what `pages` has by path, JSON or text, and 404 to all else. Yields its
    address, and what came: the path, and the header of authorisation or the body.
    """
    came = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            came.append((self.path, self.headers.get("Authorization")))
            self._say(pages.get(self.path))

        def _say(self, page):
            page = page.to_dict(mode="json") if hasattr(page, "to_dict") else page
            data = (page if isinstance(page, str) else json.dumps(page)).encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            came.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            self._say(posted)

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", came
    finally:
        running.shutdown()
        running.server_close()
        thread.join()
