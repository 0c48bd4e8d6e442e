"""Reading of a serialized protocol buffer, without its generated classes.

XLA writes its modules and buffer assignments as protocol buffers, but no package that JAX depends
on has their generated classes. The wire format is at protobuf.dev/programming-guides/encoding.
"""

type Field = int | bytes


def message(data: bytes) -> dict[int, list[Field]]:
    """Parses a message into ``{field number: values}``; texts are returned as bytes.

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
    """Returns the number in a field that occurs at most once; 0 if it is absent."""
    value = message.get(field, [0])[-1]
    assert isinstance(value, int)
    return value


def text(message: dict[int, list[Field]], field: int) -> str:
    """Returns the text in a field that occurs at most once."""
    return blob(message, field).decode(errors="replace")


def blob(message: dict[int, list[Field]], field: int) -> bytes:
    """Returns the bytes in a field that occurs at most once."""
    value = message.get(field, [b""])[-1]
    assert isinstance(value, bytes)
    return value


def blobs(message: dict[int, list[Field]], field: int) -> list[bytes]:
    """Returns all messages or texts of a repeated field."""
    return [value for value in message.get(field, []) if isinstance(value, bytes)]


def numbers(message: dict[int, list[Field]], field: int) -> list[int]:
    """Returns all numbers of a repeated field, whether written one by one or packed."""
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
