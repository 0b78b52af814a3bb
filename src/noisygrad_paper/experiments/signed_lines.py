"""Lines of JSON that end with a checksum of all their bytes before it: against damage, not against malice."""

import hashlib
import re

_LINE = re.compile(r'(.*), "checksum": "([0-9a-f]{16})"\}', re.DOTALL)


def signed(line: str) -> str:
    """An object as a line of JSON, with its checksum as the last entry."""
    start = line.removesuffix("}")
    return f'{start}, "checksum": "{_checksum(start)}"}}'


def unsigned(line: str) -> str:
    """The line that was signed; raises ValueError for any other, were it different by one bit."""
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError("it does not end with a checksum")
    if _checksum(found[1]) != found[2]:
        raise ValueError("it does not have the checksum that was written with it")
    return found[1] + "}"


def _checksum(text: str) -> str:
    """64 bits of the SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
