"""Rules for the head of a request: those of HTTP/1.1 that the parser does not enforce, and a limit of its size.

What two programs may read differently, such as a header that is given twice, is refused: a proxy in front of the server
would otherwise check one request, and the server would answer another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from effexport.serving.protocol.errors import BAD_HEAD, LARGE_HEAD, RequestError

# Of the path and all headers of a request, and of what surrounds the parts of a chunked body.
MAX_HEAD_BYTES = 32 << 10
VERSIONS = ("1.0", "1.1")
# Headers that decide what a request means.
SINGLE = (
    b"authorization",
    b"content-encoding",
    b"content-length",
    b"host",
    b"inference-header-content-length",
    b"transfer-encoding",
)


def check_head(version: str, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises RequestError for a head that is too large or ambiguous. headers: their names in lower case.

    version: of HTTP, such as "1.1". path: with the query.
    """
    size = len(path) + sum(len(name) + len(value) + 4 for name, value in headers)  # 4: what stands around them
    if size > MAX_HEAD_BYTES:
        raise RequestError(
            f"the path and the headers have {size} bytes; expected at most {MAX_HEAD_BYTES}: send less", LARGE_HEAD
        )
    if version not in VERSIONS:
        raise RequestError(f"the request is HTTP/{version}; expected HTTP/1.1", BAD_HEAD)
    counts = Counter(name for name, _ in headers)
    for name in SINGLE:
        if counts[name] > 1:
            raise RequestError(f"the header {name.decode()} is given {counts[name]} times; expected once", BAD_HEAD)
    if version == "1.1" and not counts[b"host"]:
        raise RequestError("the request has no header Host; expected one, as HTTP/1.1 requires", BAD_HEAD)
    values = dict(headers)
    coding = values.get(b"transfer-encoding", b"chunked").strip().lower()
    if coding != b"chunked":
        raise RequestError(
            f"Transfer-Encoding is {coding[:80].decode('latin-1')!r}; expected chunked, or Content-Length", BAD_HEAD
        )
    if b"upgrade" in counts and (b"transfer-encoding" in counts or values.get(b"content-length", b"0") != b"0"):
        # the parser takes what follows the head for the new protocol
        raise RequestError("the request has the header Upgrade and a body; expected HTTP/1.1 without it", BAD_HEAD)
