"""Documents whose tokens tell where they come from, for tests of the data pipeline."""

import numpy as np

from jaxinfra.data.token_arrays import TokenArrays

BOS, EOS = 1000, 1001


def numbered_documents(lengths: list[int]) -> TokenArrays:
    """Tokens 0, 1, 2... over documents of these lengths: none occurs twice."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return TokenArrays(
        tokens=np.arange(sum(lengths), dtype=np.uint16),
        starts=ends - lengths,
        lengths=np.array(lengths, np.int64),
        document_bytes=np.array(lengths, np.int64),
        vocab_size=1002,
        bos_id=BOS,
        eos_id=EOS,
        fingerprint="numbered",
    )
