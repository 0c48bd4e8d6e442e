"""Bytes that a device sends in a collective: one formula for plans, receipts and traces."""

_ROUNDS = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "all-reduce": 2,  # a reduce-scatter, then an all-gather
}


def sent_bytes(kind: str, array_bytes: float, num_devices: int) -> float:
    """Returns the bytes that one of N devices sends, in a ring or a direct exchange.

    The bytes are ``rounds * array_bytes (N - 1) / N``, with two rounds in an all-reduce and one in
    the others. A permute or shift sends ``array_bytes``.

    Args:
        kind: as HLO (``all-gather``) or as ``parallel.collectives`` (``all_gather``) writes it.
        array_bytes: bytes of the whole array: an all-gather's output, a reduce-scatter's input,
            either side of other collectives.
        num_devices: N.
    """
    if num_devices == 1:
        return 0.0
    kind = kind.replace("_", "-")
    if kind in ("permute", "collective-permute", "shift"):
        return array_bytes
    return _ROUNDS[kind] * array_bytes * (num_devices - 1) / num_devices
