"""The secret of a job: what shows that a text or a caller belongs to it.

Ranks find each other through stores that ask nobody who he is. What is read there is therefore
signed (`seal`, `unseal`), and who calls a socket of ours proves that he knows the secret, which
never travels (`sign`). The launcher of a job on one machine makes a secret for each launch; jobs of
several machines are given one in the variable HEADWAY_SECRET. Without it the signatures prove
nothing against somebody who can read the store: see docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from headway.errors import RunError, UsageError

SECRET = "HEADWAY_SECRET"
MIN_CHARACTERS = 16
SIGNATURE_BYTES = hashlib.sha256().digest_size
_SIGNATURE_DIGITS = 2 * SIGNATURE_BYTES


def job_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """The secret of this process's job; empty where there is none.

    Raises:
        UsageError: It is short enough to be guessed.
    """
    text = (os.environ if environ is None else environ).get(SECRET, "")
    if 0 < len(text) < MIN_CHARACTERS:
        raise UsageError(
            f"the environment variable {SECRET} is too short",
            why=f"It has {len(text)} characters.",
            fix=f"Give at least {MIN_CHARACTERS}, say those of `openssl rand -hex 32`.",
        )
    return os.fsencode(text)


def sign(secret: bytes, *parts: str | bytes) -> bytes:
    """HMAC-SHA256 of some parts, each with its length, so that none can be taken for another."""
    code = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        code.update(len(raw).to_bytes(8, "little") + raw)
    return code.digest()


def seal(text: str, secret: bytes, context: str) -> str:
    """A text with its signature.

    Args:
        context: What it is and whose, so that it cannot stand in the place of another.
    """
    return f"{sign(secret, context, text).hex()} {text}"


def unseal(sealed: str | bytes, secret: bytes, context: str) -> str:
    """The text of `seal`.

    Raises:
        RunError: It is not signed with this secret for this context.
    """
    raw = sealed.encode() if isinstance(sealed, str) else sealed
    given, _, body = raw.partition(b" ")
    # As bytes: compare_digest refuses texts with other characters than ASCII.
    if len(given) == _SIGNATURE_DIGITS and hmac.compare_digest(
        given, sign(secret, context, body).hex().encode()
    ):
        return body.decode()
    raise RunError(
        f"what the store says of {context} is not signed with the secret of this job",
        why="Another job or a stranger wrote it, or the ranks were given different secrets.",
        fix=f"Start all ranks with the same {SECRET}, and see docs/security.md.",
    )
