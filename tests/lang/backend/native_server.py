"""A server that speaks SGLang's native protocol as a test tells it to."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = {"model_path": "some/model-chatml", "tokenizer_path": "some/model", "is_generation": True}
CUT = object()  # the connection breaks here


class NativeServer:
    """
    Attributes:
        answers: by path, or method and path, what is answered: JSON, a tuple of a status and JSON
            (and headers), bytes or a list of bytes (of a stream, which CUT breaks), or a function
            of the body that gives one of these.
        asked: paths and bodies of the POST requests.
        headers: of the last request.
        url: of the server.
    """

    def __init__(self):
        self.answers = {"/get_model_info": INFO, "/server_info": {"version": "0.5.23"}}
        self.asked, self.headers = [], {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def log_message(self, *_):
                pass

            def do_GET(self):
                server.answer(self, None)

            def do_POST(self):
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.loads(data) if data else None
                server.asked.append((self.path, body))
                server.answer(self, body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def bodies(self, path="/generate"):
        return [body for asked, body in self.asked if asked == path]

    def answer(self, request, body):
        self.headers = dict(request.headers)
        default = self.answers.get(
            f"{request.command} {request.path}",
            (404, {"object": "error", "message": "Not Found", "code": 404}),
        )
        answer = self.answers.get(request.path, default)
        if callable(answer):
            answer = answer(body)
        with contextlib.suppress(OSError):
            if isinstance(answer, bytes | list):
                self._stream(request, [answer] if isinstance(answer, bytes) else answer)
                return
            status, content, *headers = answer if isinstance(answer, tuple) else (200, answer)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            request.send_response(status)
            request.send_header("content-length", str(len(data)))
            for name, value in headers[0].items() if headers else ():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(data)

    def _stream(self, request, parts):
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.send_header("transfer-encoding", "chunked")
        request.send_header("x-program-id", "prog-1")
        request.end_headers()
        for part in parts:
            if part is CUT:
                request.close_connection = True
                return
            if callable(part):
                part = part()
            if part:
                request.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                request.wfile.flush()
        request.wfile.write(b"0\r\n\r\n")

    def close(self):
        self._http.shutdown()
        self._http.server_close()


def event(content):
    """A server-sent event."""
    return (
        b"data: "
        + (content if isinstance(content, bytes) else json.dumps(content).encode())
        + b"\n\n"
    )


DONE = event(b"[DONE]")


def piece(text, ids, reason=None, index=None, **meta):
    """An answer of `/generate`."""
    answer = {
        "text": text, "output_ids": ids,
        "meta_info": {"id": "r", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": len(ids),
                      "cached_tokens": 1, **meta},
    }  # fmt: skip
    return answer if index is None else {**answer, "index": index}


STOP = {"type": "stop", "matched": None}
