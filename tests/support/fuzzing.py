"""Damaged and crafted inputs, and what a parser may do with them: return, or one kind of error.

    @pytest.mark.parametrize("cases", batches())
    def test_fuzz_plans(cases, tmp_path):
        fuzz("plan", cases, [good], read)

Each case is a number: a generator seeded with it and the target's name makes the input, so that a
failure names what repeats it. `batches()` are all numbers up to `CASES` under `--all-cases` (`make
test-fuzz`) and a tenth that rotates from day to day otherwise. Inputs on which a parser has failed
once are `kept` and run each time.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence

from headway.errors import HeadwayError
from support.patience import patient
from support.sampling import sampled

CASES = 5000
_BATCH = 500
_CASE_SECONDS = 3.0
_MOST_MEGABYTES = 400
_SHOWN = 3

TOKENS: tuple[bytes, ...] = (
    b"", b"0", b"-1", b"1", b"2147483648", b"9223372036854775808", b"1e999", b"-0.0", b"nan",
    b"inf", b"9" * 400, b"0x" + b"f" * 300, b"1_000", b"true", b"null", b"[]", b"{}", b"[" * 300,
    b"{" * 300,
    b'{"a":' * 300, b'""', b'"', b"'", b"\\", b"\\u0000", b"\x00", b"\xff\xfe", b"\xed\xa0\x80",
    "\u00e9\u0663\U0001f600".encode(), b"\n", b"\r\n", b"\t", b" ", b"=", b",", b":", b"%", b"%s",
    b"../../etc/passwd", b"/dev/zero", b"__class__", b"x" * 5000, b"1x", b"0x", b"100 GiB",
    b"1e308 TB",
    b"0 bit/s", b"a.b.c", b"#", b"[[x]]", b"F0", b"99999999F99999999", b"-", b"+", b"(", b")", b";",
)  # fmt: skip


def batches() -> list[range]:
    """The numbers of the cases, in batches that make a test each."""
    return sampled([range(start, start + _BATCH) for start in range(0, CASES, _BATCH)], 1)


def damaged(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples after some random changes."""
    text = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 1, 2, 5, 20, 200)))
        match rng.randrange(7):
            case 0:
                text[start:end] = b""
            case 1:
                text[start:end] = rng.choice(TOKENS)
            case 2:
                text[start:start] = text[start:end] * rng.choice((1, 2, 50))
            case 3:
                text[start:end] = rng.randbytes(end - start)
            case 4:
                other = rng.choice(samples)
                at = rng.randrange(len(other) + 1)
                text[start:end] = other[at : at + rng.randrange(1, 100)]
            case 5:
                del text[start:]
            case _:
                _change_number(rng, text, start)
    return bytes(text)


def _change_number(rng: random.Random, text: bytearray, start: int) -> None:
    """Another value for the first whole number behind a place: it stays well formed."""
    digits = next((n for n in range(start, len(text)) if 48 <= text[n] <= 57), None)
    if digits is not None:
        end = digits
        while end < len(text) and 48 <= text[end] <= 57:
            end += 1
        number = rng.choice((0, 1, 7, 63, 2**16, 2**31, 2**40, 2**62, rng.randrange(100)))
        text[digits:end] = str(number).encode()


def fuzz(
    target: str,
    cases: Sequence[int],
    samples: Sequence[bytes],
    read: Callable[[bytes], object],
    *,
    legal: tuple[type[Exception], ...] = (HeadwayError,),
    make: Callable[[random.Random, Sequence[bytes]], bytes] = damaged,
    kept: Sequence[bytes] = (),
    limit: float = _CASE_SECONDS,
) -> None:
    """Let a parser read damaged samples; fails on other errors, on hangs, on much memory.

    Args:
        samples: Good inputs; each of them must be readable.
        read: Returns, or raises one of `legal`.
        kept: Inputs that were a failure once.
        limit: Seconds that one input may take.
    """
    for sample in samples:
        read(sample)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbered = [(f"kept {number}", text) for number, text in enumerate(kept)]
    numbered += [
        (f"case {case}", make(random.Random(f"{target} {case}"), samples)) for case in cases
    ]
    failures = []
    for name, text in numbered:
        began = time.monotonic()
        try:
            read(text)
        except legal:
            pass
        except Exception as error:
            failures.append(
                f"{name}: {type(error).__name__}: {error}"[:300] + f"\n    {text[:600]!r}"
            )
        seconds = time.monotonic() - began
        if seconds > patient(limit):
            failures.append(f"{name}: {seconds:.1f} s\n    {text[:600]!r}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > _MOST_MEGABYTES:
        failures.append(f"{grown:.0f} MiB more memory than before")
    assert not failures, f"{len(failures)} of {len(numbered)} inputs of {target}:\n" + "\n".join(
        failures[:_SHOWN]
    )
