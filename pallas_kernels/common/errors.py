"""Errors of every op: each message says what is wrong, the actual values, the rule, the remedy."""


class InputError(ValueError):
    """Arguments that no implementation could accept: shapes, dtypes or options that disagree."""


class UnsupportedError(NotImplementedError):
    """A valid call that the named implementation cannot serve; the message says which can."""
