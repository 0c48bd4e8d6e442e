"""Errors of every op: each message says what is wrong, the actual values, the rule, the remedy."""


class InputError(ValueError):
    """Error for arguments that no implementation could accept: wrong shapes, dtypes or options.

    Examples:
        >>> try:
        ...     pallas_kernels.softmax(jnp.arange(4))
        ... except pallas_kernels.InputError as error:
        ...     print(error)
        x is int32[4]...
    """


class UnsupportedError(NotImplementedError):
    """Error for a valid call that the named implementation cannot compute; it names one that can.

    Examples:
        >>> x, w = jnp.ones((3, 64)), jnp.ones((64, 32))
        >>> try:
        ...     pallas_kernels.few_rows_matmul(x, w, implementation="hopper")
        ... except pallas_kernels.UnsupportedError as error:
        ...     print("xla" in str(error))
        True
    """
