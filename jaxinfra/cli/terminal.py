"""Sanitizing of model text for a terminal."""


def printable(text: str) -> str:
    """Returns a model's text without control characters that would change a terminal's state."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
