"""pure: text with units becomes numbers and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.units import (
    Amount,
    format_bytes,
    format_number,
    format_rate,
    format_seconds,
    format_share,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

UNITS = ("steps", "epochs", "samples", "tokens")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80 GiB", 80 * 2**30),
        ("80GiB", 80 * 2**30),
        ("1.5 MB", 1_500_000),
        ("2 kB", 2000),
        ("2 KB", 2000),
        ("4096", 4096),
        (4096, 4096),
        ("1_000 B", 1000),
        (" 7 B ", 7),
        ("1e3", 1000),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2 ms", 2e-3), ("1.5 h", 5400.0), ("30", 30.0), (0.5, 0.5), ("3 min", 180.0), ("1 d", 86400)],
)
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25 Gbit/s", 3.125e9), ("3 GB/s", 3e9), ("8 bit/s", 1.0), ("1 MiB/s", 2**20)],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_bytes, "80 GiBs", "GiB"),
        (parse_bytes, "80 gb", "GB"),
        (parse_bytes, "-1 B", "size"),
        (parse_bytes, "", "size"),
        (parse_bytes, True, "size"),
        (parse_bytes, "1e400 B", "size"),
        (parse_seconds, "2 sec", "ms"),
        (parse_seconds, "nan", "duration"),
        (parse_rate, "25", "Gbit/s"),
        (parse_rate, "25 Gbit", "Gbit/s"),
    ],
)
def test_what_is_not_an_amount_names_the_legal_units(parse, text, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        parse(text)
    assert str(caught.value).startswith(repr(text))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1000 * 1024, "0.977 MiB"),
        (2**20 - 1, "1 MiB"),
        (25 * 2**20, "25 MiB"),
        (-2048, "-2 KiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_sizes_as_text(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-9, "5 ns"),
        (0.0021, "2.1 ms"),
        (0.0009996, "1 ms"),
        (0.99996, "1 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (65, "1 min 5 s"),
        (3599.8, "1 h"),
        (5400, "1.5 h"),
        (1e7, "2778 h"),
        (-0.002, "-2 ms"),
        (math.inf, "inf s"),
    ],
)
def test_durations_as_text(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(3.125e9, "25 Gbit/s"), (124.99e6, "1 Gbit/s"), (1e15, "8000 Tbit/s")]
)
def test_rates_as_text(rate, text):
    assert format_rate(rate) == text


@given(st.floats(min_value=1, max_value=1e17))
def test_a_size_survives_its_text_to_three_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006, abs=0.51)


@given(st.floats(min_value=1e-9, max_value=59))
def test_a_duration_survives_its_text_to_three_digits(seconds):
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


@given(st.floats(min_value=1, max_value=1e14))
def test_a_rate_survives_its_text_to_three_digits(rate):
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=0.006)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_text_has_an_exponent_for_everyday_numbers(value):
    if abs(value) >= 1:
        for text in (format_bytes(value), format_seconds(value), format_rate(value)):
            assert "e+" not in text


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("300 steps", Amount(300, "steps")),
        ("1 epoch", Amount(1, "epochs")),
        ("10M samples", Amount(10_000_000, "samples")),
        ("10 M samples", Amount(10_000_000, "samples")),
        ("10Msamples", Amount(10_000_000, "samples")),
        ("0.5k samples", Amount(500, "samples")),
        ("1k", Amount(1000, "steps")),
        ("2K tokens", Amount(2000, "tokens")),
        (64, Amount(64, "steps")),
        ("64", Amount(64, "steps")),
        ("9007199254740993", Amount(2**53 + 1, "steps")),
    ],
)
def test_counts(text, amount):
    assert Amount.parse(text, UNITS) == amount


@pytest.mark.parametrize(
    "text",
    [
        *("", "steps", "k", "0 steps", "-3 steps", "1.5 steps", "3 stepss", "3 miles"),
        *("5 Ki samples", "1e400", "1e99999999999999999999 steps", "True", "ten steps"),
    ],
)
def test_what_is_not_a_count_names_the_legal_units(text):
    with pytest.raises(ValueError, match="steps or epochs or samples or tokens"):
        Amount.parse(text, UNITS)


@given(st.integers(1, 10**17), st.sampled_from(UNITS))
def test_a_count_survives_its_text(value, unit):
    amount = Amount(value, unit)
    assert Amount.parse(str(amount), UNITS) == amount


def test_a_unit_that_begins_like_a_prefix_is_not_cut():
    assert Amount.parse("5 knots", ("knots",)) == Amount(5, "knots")
    assert Amount.parse("5 k knots", ("knots",)) == Amount(5000, "knots")


def test_one_is_singular():
    assert str(Amount(1, "steps")) == "1 step"
    assert str(Amount(2, "steps")) == "2 steps"


@pytest.mark.parametrize(
    ("value", "text"), [(0.04941, "0.0494"), (13.9, "13.9"), (999.4, "999"), (10437.2, "10,437")]
)
def test_numbers_without_an_exponent(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0%"), (0.078, "7.8%"), (0.00051, "0.051%"), (5.09e-5, "0.0051%")]
)
def test_a_small_share_is_not_nothing(share, text):
    assert format_share(share) == text
