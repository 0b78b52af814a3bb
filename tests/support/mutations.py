"""Files damaged at random, as disks, networks and editors do it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator


def _places(data: bytes, chance: random.Random, count: int) -> list[int]:
    """Different places in order; among the first 2000 bytes, where headers are, as often as anywhere."""
    top = min(len(data), chance.choice([2000, len(data)]))
    return sorted(chance.sample(range(top + 1), min(count, top + 1)))


def _some_bytes(chance: random.Random) -> bytes:
    alphabet = chance.choice([bytes(range(256)), b"\0", b"0123456789.eE+-", b'{}[]",:\n'])
    return bytes(chance.choices(alphabet, k=chance.randint(1, 16)))


def _flip_bits(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for place in _places(data[:-1], chance, chance.choice([1, 1, 1, 2, 8])):
        found[place] ^= 1 << chance.randrange(8)
    return bytes(found)


def _truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: _places(data, chance, 1)[0]]


def _insert(data: bytes, chance: random.Random) -> bytes:
    (place,) = _places(data, chance, 1)
    return data[:place] + _some_bytes(chance) + data[place:]


def _remove(data: bytes, chance: random.Random) -> bytes:
    start, end = _places(data, chance, 2)
    return data[:start] + data[min(end, start + chance.choice([1, 16, len(data)])) :]


def _overwrite(data: bytes, chance: random.Random) -> bytes:
    (place,), some = _places(data, chance, 1), _some_bytes(chance)
    return data[:place] + some + data[place + len(some) :]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    start, end = _places(data, chance, 2)
    return data[:end] + data[start:end] + data[end:]


def _swap_bytes(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    one, two = _places(data[:-1], chance, 2)
    found[one], found[two] = found[two], found[one]
    return bytes(found)


def _swap_segments(data: bytes, chance: random.Random) -> bytes:
    a, b, c, d = _places(data, chance, 4)
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _edit_a_word(data: bytes, chance: random.Random) -> bytes:
    """Another digit or another letter in its text, which stays as long as it was and well formed."""
    places = [place for place, byte in enumerate(data[:4000]) if chr(byte).isalnum() and byte < 128]
    if not places:
        return data
    place = chance.choice(places)
    alphabet = b"0123456789" if chr(data[place]).isdigit() else b"abcdefghijklmnopqrstuvwxyz"
    return data[:place] + bytes([chance.choice(alphabet)]) + data[place + 1 :]


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flip_bits,
    "cut off": _truncate,
    "bytes inserted": _insert,
    "bytes removed": _remove,
    "bytes overwritten": _overwrite,
    "segment repeated": _repeat,
    "bytes swapped": _swap_bytes,
    "segments swapped": _swap_segments,
    "header edited": _edit_a_word,
}


def mutated(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` mutations with their names, every one of them other bytes than those given."""
    chance = random.Random(seed)
    names = list(MUTATIONS)
    while count:
        name = chance.choice(names)
        found = MUTATIONS[name](data, chance)
        if found != data:
            count -= 1
            yield name, found


def signed(data: bytes) -> bytes:
    """A damaged archive with the checksum that its bytes have now, as no damage makes it."""
    before, mark, rest = data.partition(b'"noisygrad_checksum":"')
    if not mark:
        return data
    digits = hashlib.sha256(before + mark + b"0" * 64 + rest[64:]).hexdigest()
    return before + mark + digits.encode() + rest[64:]
