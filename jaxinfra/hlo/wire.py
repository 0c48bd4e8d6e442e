"""Reading of a serialized protocol buffer, without its classes.

XLA's executables hand out their buffer assignment and their module as protocol buffers, and their
classes come with no package that JAX needs. The wire format is protobuf.dev/programming-guides/
encoding.
"""

type Field = int | bytes


def message(data: bytes) -> dict[int, list[Field]]:
    """Parses a message; returns all values of each field by its number; texts are bytes.

    Raises ValueError for data that is no protocol buffer.
    """
    found: dict[int, list[Field]] = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind not in (0, 1, 2, 5):
            raise ValueError(f"wire type {kind} at byte {place}")
        size = {1: 8, 5: 4}.get(kind)
        if size is None:  # a number, or the length of what follows
            size, place = _varint(data, place)
        value = size if kind == 0 else data[place : place + size]
        found.setdefault(number, []).append(value)
        place += 0 if kind == 0 else size
    if place != len(data):
        raise ValueError(f"{len(data)} bytes end within a field")
    return found


def number(message: dict[int, list[Field]], field: int) -> int:
    """Returns a number that occurs at most once; 0 where it is left out."""
    value = message.get(field, [0])[-1]
    assert isinstance(value, int)
    return value


def text(message: dict[int, list[Field]], field: int) -> str:
    """Returns a text that occurs at most once."""
    return blob(message, field).decode(errors="replace")


def blob(message: dict[int, list[Field]], field: int) -> bytes:
    """Returns bytes that occur at most once."""
    value = message.get(field, [b""])[-1]
    assert isinstance(value, bytes)
    return value


def blobs(message: dict[int, list[Field]], field: int) -> list[bytes]:
    """Returns all messages or texts of a field."""
    return [value for value in message.get(field, []) if isinstance(value, bytes)]


def numbers(message: dict[int, list[Field]], field: int) -> list[int]:
    """Returns all numbers of a field, written one by one or packed."""
    found = []
    for value in message.get(field, []):
        if isinstance(value, int):
            found.append(value)
            continue
        place = 0
        while place < len(value):
            each, place = _varint(value, place)
            found.append(each)
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data):
            raise ValueError(f"{len(data)} bytes end within a number")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
