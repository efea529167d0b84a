"""Quantities as people write them: "100mbit", "7B", "50us"; read strictly, shown with three digits.

Prefixes are decimal, as networks count: 1 kbit is 1000 bits. Letters may be small or capital, but for
``b`` and ``B`` of a rate: ``MB`` and ``MBps`` are bytes, ``mbps`` is bits, and ``mb`` is not read, because
people write it for both.
"""

import argparse
import re

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RATES = {
    f"{prefix}{unit}".lower(): scale * bits
    for prefix, scale in PREFIXES.items()
    for unit, bits in (("bit", 1), ("byte", 8))
}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {f"{prefix}b".lower(): scale for prefix, scale in PREFIXES.items()}
COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
LONG = 10_000  # seconds, from which on a time is shown in hours
LARGEST = 1e15  # beyond it are typing errors, and from 2**53 on a float has no exact value

_QUANTITY = re.compile(r"\s*([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z%]*)\s*", re.IGNORECASE)
# Units of rates in few letters, which are read in these alone, behind a prefix.
_SHORT = re.compile(r"(?<=[kKmMgGtT])(bps|Bps|B)$")
_PER_SECOND = re.compile(r"/s$", re.IGNORECASE)


class NotRead(ValueError, argparse.ArgumentTypeError):
    """What is no quantity; argparse shows its words."""


def rate(text: str) -> float:
    """Reads a network rate.

    Args:
      text: such as ``"100mbit"``, ``"2.5 Gbit/s"``, ``"400gbps"``, ``"50mbyte"``, ``"600GB"``; a unit is
        needed.

    Returns:
      Bits per second.

    Raises:
      ValueError: for anything else, and for a rate that is not above zero.

    Example:
      >>> rate("100mbit"), rate("2 Gbyte/s")
      (100000000.0, 16000000000.0)
    """
    unit = _PER_SECOND.sub("", text.strip())
    spelled = _SHORT.sub(lambda short: "bit" if short[0] == "bps" else "byte", unit)
    return _read("rate", text, RATES, "100mbit, 2.5gbit or 50mbyte (per second)", spelled)


def seconds(text: str) -> float:
    """Reads a time above zero, such as ``"50us"``, ``"1.5ms"`` or ``"2s"``; a unit is needed.

    Raises:
      ValueError: for anything else.

    Example:
      >>> seconds("1.5ms")
      0.0015
    """
    return _read("time", text, TIMES, "50us, 1.5ms or 2s")


def size(text: str) -> float:
    """Reads bytes, such as ``"24GB"``; a unit is needed.

    Raises:
      ValueError: for anything else.

    Example:
      >>> size("24GB")
      24000000000.0
    """
    return _read("size", text, SIZES, "500MB, 24GB or 1.5TB")


def count(text: str) -> int:
    """Reads a number of things from 1 to 1e15, such as ``"7B"``, ``"434_816"`` or ``"1.3M"``.

    Raises:
      ValueError: for anything else, and where it is not a whole number.

    Example:
      >>> count("7B"), count("434_816")
      (7000000000, 434816)
    """
    number = _read("number", text.replace("_", ""), COUNTS, "434816, 1.3M or 7B")
    if number != int(number):
        raise NotRead(f"number {text!r}: give a whole number, such as 434816, 1.3M or 7B")
    return int(number)


def _read(
    kind: str, text: str, units: dict[str, float], examples: str, spelled: str | None = None
) -> float:
    match = _QUANTITY.fullmatch(text if spelled is None else spelled)
    if not match:
        raise NotRead(f"{kind} {text!r}: give a number and a unit, such as {examples}")
    scale = units.get(match[2].lower())
    if scale is None:
        known = ", ".join(name for name in units if name)
        raise NotRead(f"{kind} {text!r}: unit {match[2]!r} is not one of {known}; give {examples}")
    number = float(match[1]) * scale
    if not 0 < number <= LARGEST:
        raise NotRead(
            f"{kind} {text!r}: give a number above zero, of at most {LARGEST:.0e}, such as {examples}"
        )
    return number


def rate_text(bits_per_second: float) -> str:
    """Shows a rate for people.

    Example:
      >>> rate_text(1e8), rate_text(2.5e9)
      ('100 Mbit/s', '2.5 Gbit/s')
    """
    return _shown(bits_per_second, "bit/s")


def bytes_text(count: float) -> str:
    """Shows bytes for people, in decimal units.

    Example:
      >>> bytes_text(1_369_000)
      '1.37 MB'
    """
    return _shown(count, "B")


def seconds_text(time: float) -> str:
    """Shows a time for people.

    Example:
      >>> seconds_text(0.0123), seconds_text(3.817), seconds_text(5e-5), seconds_text(36_425)
      ('12.3 ms', '3.82 s', '50 us', '10.1 h')
    """
    return f"{_digits(time / 3600)} h" if time >= LONG else _shown(time, "", TIMES)


def _shown(number: float, unit: str, scales: dict[str, float] = PREFIXES) -> str:
    fitting = [name for name in scales if number >= scales[name]]
    name = fitting[-1] if fitting else next(iter(scales))
    return f"{_digits(number / scales[name])} {name}{unit}"


def _digits(number: float) -> str:
    """Shows three digits that count, and all of those before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
