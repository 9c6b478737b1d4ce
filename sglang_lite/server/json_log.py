"""The log as lines of JSON, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """Formatter of a line of JSON for each message: `time` (UTC), `level`, `logger`, `message`; of a request also
    `method`, `route`, `status`, `ms` and `request_id`; of an exception `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **getattr(record, "request", {}),
        }  # fmt: skip
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)
