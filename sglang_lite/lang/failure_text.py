"""Describes exceptions to a model: their class and message, without paths, addresses and anything
that looks like a key.
"""

from __future__ import annotations

import re
from typing import Final

_MAX_CHARACTERS: Final = 2000  # characters of a message that a model reads
_MAX_READ: Final = 4000  # characters of a message that are searched for secrets

_ADDRESS = re.compile(
    r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s'\"<>]+"
    r"|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64}){1,8}"
    r"|\b(?:localhost|\d{1,3}(?:\.\d{1,3}){3})(?::\d{1,5})?\b"
    r"|\b[a-zA-Z][\w-]{0,62}(?:\.[\w-]{1,63}){1,8}:\d{2,5}\b"
    r"|\b0x[0-9a-fA-F]{8,}\b"
)
_NAMED_SECRET = re.compile(
    r"(?i)\b((?:[\w-]{0,40}[_-])?(?:api[_-]?key|key|token|secret|passwords?|passwd|pwd|authorization))"
    r"(['\"]?\s{0,3}[=:]\s{0,3})(?:(?:bearer|basic)\s{1,3})?['\"]?[^\s'\",;)\]}]+['\"]?"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s{1,3}[\w+/=.~-]{8,}")
_KEY = re.compile(
    r"\b(?:sk|pk|rk|hf|glpat|gh[opsu]|github_pat|xox[abps])[-_][\w.-]{8,}"
    r"|\bA(?:KIA|SIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]{10,}\.[\w.-]+|\b[0-9a-fA-F]{32,}\b"
    r"|(?<![\w-])(?=[\w-]{0,99}\d)(?=[\w-]{0,99}[a-z])(?=[\w-]{0,99}[A-Z])[\w-]{24,}"
)
_PATH = re.compile(r"(?<![\w/\\.…])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"<>|:*?,;()\[\]]+)*[/\\]")
_FOLDERS = "…/"  # stands for the folders of a path


def describe_failure(error: BaseException) -> str:
    """Describes an exception to a model: its class and its redacted message."""
    try:
        message = str(error)
    except Exception:  # a user's exception may fail to be text
        message = ""
    name = type(error).__name__
    return f"{name}: {redact(message)}" if message else name


def hide_secrets_of_url(url: str) -> str:
    """Returns a URL without its user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def redact(text: str) -> str:
    """Removes addresses, anything that looks like a key, and the folders of absolute paths from a
    text. Long texts are cut.
    """
    text = text[:_MAX_READ]
    text = _ADDRESS.sub("(address)", text)
    text = _NAMED_SECRET.sub(r"\1\2(secret)", text)
    text = _BEARER.sub(r"\1 (secret)", text)
    text = _PATH.sub(_FOLDERS, text)
    text = _KEY.sub("(secret)", text)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"
