"""Text that may be written to a terminal."""


def printable(text: str) -> str:
    """Text of a model, without the control characters that would change a terminal's state."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
