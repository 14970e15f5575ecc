"""Sizes as people write and read them: ``"1.5 TB"`` -> 1500000000000 bytes, and back."""

import re

_UNITS = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGTP", start=1)
}


def parse_bytes(text: str) -> int:
    """A positive number and a unit, nothing else.

    Raises:
        ValueError: anything else, with the units that are understood.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(
            f"'{text}' is not a size: write a number and a unit, such as 500GB or 1.5TiB"
            f" (units: {', '.join(_UNITS)})"
        )
    return round(float(match[1]) * _UNITS[match[2]])


def human_bytes(count: float) -> str:
    """A size in decimal units, as disks are sold: 1234567 -> '1.2 MB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
