"""Bytes that a device sends in a collective: one formula for plans, receipts and traces."""

_ROUNDS = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "all-reduce": 2,  # a reduce-scatter, then an all-gather
}


def sent_bytes(kind: str, array_bytes: float, num_devices: int) -> float:
    """Returns the bytes that one of N devices sends, in a ring or a direct exchange.

    ``rounds * array (N - 1) / N``; a permute or shift sends the array as it is.

    Args:
        kind: as HLO (``all-gather``) or as ``parallel.collectives`` (``all_gather``) writes it.
        array_bytes: bytes of the whole array, as a device has it after an all-gather, before a
            reduce-scatter, and on either side of the others.
        num_devices: N.
    """
    if num_devices == 1:
        return 0.0
    kind = kind.replace("_", "-")
    if kind in ("permute", "collective-permute", "shift"):
        return array_bytes
    return _ROUNDS[kind] * array_bytes * (num_devices - 1) / num_devices
