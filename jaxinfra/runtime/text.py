"""Numbers and words as people write them."""

_DIGITS = 18  # those of any size; Python itself refuses to read thousands


def whole_number(text: str) -> int | None:
    """The number that decimal digits spell; None for any other text, and beyond 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def is_text(word: str) -> bool:
    """Whether it has characters only: bytes of a command line that are no UTF-8 have none."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
