"""The log of a server, or of several behind a gateway: as text, or as lines of JSON."""

from __future__ import annotations

import json
import logging
import time

from sglang_lite.server.settings import ServerSettings


def configure(settings: ServerSettings) -> None:
    """Configures logging to stderr from the settings, unless logging is configured already."""
    # the process id distinguishes several servers
    line = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=line)
    if settings.log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    if settings.log_level != "debug":
        # httpx2 logs a line for each poll of another server
        logging.getLogger("httpx2").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """Formatter that writes a line of JSON for each message: `time` (UTC), `level`, `process`,
    `logger`, `message`; for a request also `method`, `route`, `status`, `ms` and `request_id`; for
    an exception also `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)
