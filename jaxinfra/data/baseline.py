"""Compression of the held-out text by gzip and xz, to compare a model's bits per byte with."""

import dataclasses
import gzip
import lzma
from collections.abc import Sequence

from jaxinfra.errors import DataError

_XZ_9_DICTIONARY_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompressionBaseline:
    """Bits per byte of the held-out documents when compressed by gzip and by xz."""

    gzip_each: float  # gzip -9 of each document alone, as a model that sees one at a time
    gzip_all: float  # gzip -9 of all of them one after another
    xz_all: float  # xz -9 of all of them one after another
    num_bytes: int


def compressed_bits_per_byte(documents: Sequence[bytes]) -> CompressionBaseline:
    """Compresses documents with ``gzip -9`` and ``xz -9``, and returns bits per byte of text."""
    whole = b"".join(documents)
    if not whole:
        raise DataError(f"{len(documents)} held-out documents without a byte; nothing to compress")
    bits = 8 / len(whole)
    # xz -9 would reserve 674 MB; no dictionary beyond the text itself changes what it finds.
    dictionary_bytes = min(_XZ_9_DICTIONARY_BYTES, max(4096, len(whole)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary_bytes}]
    return CompressionBaseline(
        gzip_each=bits * sum(len(gzip.compress(document, 9)) for document in documents),
        gzip_all=bits * len(gzip.compress(whole, 9)),
        xz_all=bits * len(lzma.compress(whole, filters=filters)),
        num_bytes=len(whole),
    )
