"""What may be written to a terminal."""


def printable(text: str) -> str:
    """What a model drew, without the control characters that would change a terminal's state."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
