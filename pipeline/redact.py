"""Takes secrets out of text before a person or a log sees it.

Who calls it: settings (every print), telemetry (every log value), the CLI (every error).
What must stay true: pure; never raises; the rest of the text survives, so that an address can
still be recognised.
"""

from __future__ import annotations

import re

MASK = "***"

_SENSITIVE = r"pass(?:word|wd)|secret|token(?!s)|api[_-]?key|access[_-]?key|credential"
# scheme://user:password@host and scheme://:password@host; the user name stays, it is no secret
_URL_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.\-]*://[^\s/?#@:]*:)[^\s/?#]*(?=@)")
# A password may hold '/', '?' or '#' unescaped: everything up to the last '@' is hidden then.
_URL_BAD_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.\-]*://[^\s/?#@:]*:)[^\s@]*(?=@)")
# Mistyped addresses and bare logins: redis:/user:password@host, user:password@host
_LOGIN = re.compile(r"(?P<head>\b[A-Za-z][\w+.\-]*:(?!//)(?:/(?:[^\s/?#@:]*:)?)?)[^\s@]+(?=@)")
_QUERY_SECRET = re.compile(rf"(?P<head>[?&;][^=\s&?]*(?:{_SENSITIVE})[^=\s&?]*=)[^&\s;]+", re.I)
_SECRET_NAME = re.compile(_SENSITIVE, re.I)


def redact(text: str) -> str:
    """`text` with URL passwords and secret query parameters replaced by `***`."""
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\g<head>{MASK}", text)
        text = _URL_BAD_PASSWORD.sub(rf"\g<head>{MASK}", text)
    if "@" in text:
        text = _LOGIN.sub(rf"\g<head>{MASK}", text)
    if "=" in text:
        text = _QUERY_SECRET.sub(rf"\g<head>{MASK}", text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether a setting or header of this name holds a secret."""
    return _SECRET_NAME.search(name.rsplit(".", 1)[-1]) is not None
