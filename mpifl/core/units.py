"""Units of configuration keys: `20ms`, `3min`, `2GB`, `1Mbit/s` become numbers in the unit of their key.

A field declares its unit by the end of its name (`latency_s`, `sample_cache_mb`, `uplink_bytes_s`), or by
`field(metadata={"unit": Unit(...)})`. A number without a unit is in that unit. Bits and bytes are
distinguished (`Mbit`, `MB`), and so are powers of ten and of two (`MB`, `MiB`). Ambiguous units (`Mb`, `KB`)
are refused.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cache

from .errors import UserError

TIME, SIZE, RATE = "time", "size", "rate"
_ABOUT = {  # dimension -> what it is called, examples
    TIME: ("a time", "20ms, 1.5s or 3min"),
    SIZE: ("a size", "500kB, 2GB or 2GiB"),
    RATE: ("a rate", "1Mbit/s, 125kB/s or 1Gbit/s"),
}
_SI = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
TIMES: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}  # in seconds
SIZES: dict[str, Fraction] = {
    **{f"{prefix}B": Fraction(factor) for prefix, factor in (_SI | _BINARY).items()},
    **{f"{prefix}bit": Fraction(factor, 8) for prefix, factor in (_SI | _BINARY).items()},
}  # in bytes
RATES: dict[str, Fraction] = {
    **{f"{size}/s": factor for size, factor in SIZES.items()},
    **{f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _SI.items()},
}  # in bytes per second
_KNOWN = {TIME: TIMES, SIZE: SIZES, RATE: RATES}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\W\d_][\w/]*)\s*")


@dataclass(frozen=True)
class Unit:
    """The unit of a key.

    Attributes:
        name: the unit in words, in the plural.
        dimension: `time`, `size` or `rate`; empty where values can have no other unit.
        factor: the unit in seconds, bytes, or bytes per second.
    """

    name: str
    dimension: str = ""
    factor: Fraction = Fraction(1)

    @property
    def examples(self) -> str:
        """How values may be written with a unit; empty where they cannot."""
        return _ABOUT[self.dimension][1] if self.dimension else ""


ENDINGS: dict[str, Unit] = {
    "bytes_s": Unit("bytes per second", RATE),
    "bytes": Unit("bytes", SIZE),
    "_mb": Unit("megabytes", SIZE, Fraction(10**6)),
    "_s": Unit("seconds", TIME),
    "seconds": Unit("seconds", TIME),
    "minutes": Unit("minutes", TIME, Fraction(60)),
    "epochs": Unit("epochs"),
    "rounds": Unit("server steps"),
    "milestones": Unit("server steps"),
    "every": Unit("server steps"),
    "joins": Unit("server steps"),
    "leaves": Unit("server steps"),
    "max_staleness": Unit("server steps"),
    "participation": Unit("fraction of the clients"),
    "cohort_size": Unit("clients"),
    "clients": Unit("clients"),
    "batch_size": Unit("samples"),
    "angles": Unit("degrees"),
    "ranks": Unit("ranks"),
    "threads": Unit("threads"),
}  # by the end of a key's name; the first that fits


@cache
def unit_of(cls: type, name: str) -> Unit | None:
    """Return the unit of a field of a dataclass; None for none."""
    for field in dataclasses.fields(cls):
        if field.name == name and "unit" in field.metadata:
            declared = field.metadata["unit"]
            assert isinstance(declared, Unit)
            return declared
    return next((unit for end, unit in ENDINGS.items() if name.endswith(end)), None)


def quantity(text: str, unit: Unit, key: str) -> float:
    """Return the value of a text, with or without a unit, in the unit of a key.

    Args:
        text: such as `20ms` or `0.02`.
        unit: unit of the key.
        key: the key, for messages.

    Raises:
        UserError: the text is not a number, or its unit is unknown or of another dimension.
    """
    try:
        return float(text)
    except ValueError:
        pass
    found = _QUANTITY.fullmatch(text)
    wanted = f"{unit.name} are asked" + (f", such as {unit.examples}" if unit.examples else "")
    if found is None or not unit.dimension:
        raise UserError(key, text, f"is not a number; {wanted}")
    number, name = found[1].replace("_", ""), found[2]
    dimension = next((d for d, names in _KNOWN.items() if name in names), "")
    if not dimension:
        raise UserError(key, text, f"{_unknown(name)}; {wanted}")
    if dimension != unit.dimension:
        raise UserError(key, text, f"{name} is the unit of {_ABOUT[dimension][0]}; {wanted}")
    try:
        return float(Fraction(Decimal(number)) * _KNOWN[dimension][name] / unit.factor)
    except (InvalidOperation, OverflowError) as error:
        raise UserError(key, text, f"is not a number that can be stored; {wanted}") from error


def _unknown(name: str) -> str:
    """Return what is wrong with the name of a unit."""
    size, slash, per = name.partition("/")
    if re.fullmatch(r"[kKMGT]?i?b", size):
        plain = size[:-1].replace("K", "k") if "i" not in size else size[:-1]
        return f"{name!r} can be bits or bytes: write {plain}bit{slash}{per} or {plain}B{slash}{per}"
    if size in ("KB", "Kbit"):
        end = f"{size[1:]}{slash}{per}"
        return f"{name!r} can be 1000 or 1024: write k{end} or Ki{end}"
    return f"{name!r} is not a known unit"


BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def byte_unit(count: float) -> tuple[float, str]:
    """Return the unit in which a number of bytes is shown, in bytes, and its name."""
    return next((unit for unit in BYTES if abs(count) >= unit[0]), BYTES[-1])


def in_bytes(count: float) -> str:
    """Return a number of bytes with a unit, such as 1.25 GB."""
    size, name = byte_unit(count)
    return f"{count / size:.4g} {name}"
