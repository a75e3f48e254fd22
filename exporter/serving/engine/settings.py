"""Settings of the server: limits, batching and waiting times. Every default is here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from effexport.base.errors import UserError
from effexport.base.formatting import bytes_from_text, tokens_from_text
from effexport.base.machine import STATUS
from effexport.base.option_fields import A_NUMBER, Option, option, options_of
from effexport.keyless import IdentityOptions, as_given

TOKEN_VARIABLE = "EFFEXPORT_SERVE_TOKEN"
# Longest sequence if neither the model nor --max-seq-len limits it.
DEFAULT_MAX_SEQ_LEN = 16384
# Number of request bodies of the largest size that may be in memory at once, complete or not.
BODIES_IN_MEMORY = 4

# Of a model: valid as a folder name, in a URL, and in the command line that starts Triton's Python processes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(name: str) -> str:
    """Raises UserError for what cannot be the name of a model."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"the model's name is {name[:160]!r}; expected at most 128 letters, digits, '.', '_' and '-', the first a "
            "letter or digit: choose one with --name"
        )
    return name


# Each is a thread.
MOST_CONCURRENT_RUNS = 256
# A day in milliseconds, and years in seconds.
LONGEST_WAIT = 86_400_000.0

# Texts of one request, as many as clients send to other servers of embeddings; and windows of one text.
MAX_TEXTS = 2048
# Of one text, in UTF-8.
MAX_TEXT_BYTES = 256 << 10
# Of all texts that are tokens at the same time, each of which takes about 600 bytes.
TEXT_CHARACTERS_IN_MEMORY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServingSettings(IdentityOptions):
    """Limits and waiting times of a server; None leaves those that depend on the machine to it."""

    identity: str | Path | None = option(
        None,
        "Load only what it signed: a public key, or a name.",
        flag="--require-identity",
        metavar="WHO",
        read=as_given,
    )
    max_batch: int = option(8, "Most rows of a run.", metavar=A_NUMBER)
    max_padding: float = option(0.1, "Largest share of padding in a run.", metavar="SHARE")
    max_run_tokens: int | None = option(None, "Most tokens of a shared run; default: 256 a core.", metavar=A_NUMBER)
    concurrent_runs: int | None = option(None, "Runs of a model at a time; default: 1 or 2.", metavar=A_NUMBER)
    batch_delay_ms: float = option(0.0, "Milliseconds that a run waits for more requests.", metavar="MS")
    queue_size: int = option(64, "Requests that may wait; then 503.", metavar=A_NUMBER)
    max_sessions: int = option(64, "Texts generated at a time; then 503.", metavar=A_NUMBER)
    max_request_bytes: int = option(64 << 20, "Largest body, also decompressed.", metavar=A_NUMBER)
    max_seq_len: int | None = option(
        None, "Longest sequence; default: the model's, or 16384.", metavar="LENGTH", read=tokens_from_text
    )
    max_memory_bytes: int | None = option(
        None, "No model is loaded beyond it, such as 8GiB.", flag="--max-memory", metavar="SIZE", read=bytes_from_text
    )
    timeout_s: float = option(30.0, "Longest wait of a request.", flag="--timeout", metavar="SECONDS")
    token: str | None = field(
        default=None,
        repr=False,
        metadata={
            "option": Option(
                f"Clients must send it; or set {TOKEN_VARIABLE}.", metavar="TOKEN", variable=TOKEN_VARIABLE
            )
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = options_of(ServingSettings)
        for name, one in known.items():
            value = getattr(self, name)
            if one.kind is int and value is not None and value < 1:
                raise UserError(f"{one.flags[0]} is {value}; expected at least 1")
        if self.concurrent_runs is not None and self.concurrent_runs > MOST_CONCURRENT_RUNS:
            raise UserError(f"--concurrent-runs is {self.concurrent_runs}; expected at most {MOST_CONCURRENT_RUNS}")
        if not 0 <= self.max_padding < 1:
            raise UserError(f"--max-padding is {self.max_padding:g}; expected a share, at least 0 and below 1")
        for name, low in (("batch_delay_ms", 0.0), ("timeout_s", 1e-3)):
            value = getattr(self, name)
            if not (low <= value <= LONGEST_WAIT):
                flag = known[name].flags[0]
                raise UserError(f"{flag} is {value:g}; expected a number from {low:g} to {LONGEST_WAIT:g}")
        if self.max_memory_bytes is not None and not STATUS.exists():
            raise UserError("--max-memory needs /proc, which this system does not have; leave it out")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise UserError(
                "the token is empty or has characters that an HTTP header cannot contain; expected printable ASCII"
            )

    @property
    def max_bytes_in_memory(self) -> int:
        """Limit for the bodies of all requests together."""
        return BODIES_IN_MEMORY * self.max_request_bytes
