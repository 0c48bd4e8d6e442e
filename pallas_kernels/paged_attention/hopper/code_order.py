"""Which keys and columns a lane of a warp multiplies, of tiles in few bits.

A warp computes products of 16 keys, or of 16 columns of values, with 8 queries at a time
(``mma.m16n8k16``). Which key is a product's row, and in which order columns are contracted, is
free as long as both sides agree. So lane ``4 g + t`` takes what lies in words that no other lane
reads at the same time, and what a word's bits become in one instruction is one register:

* keys: of 8, row g of a product is not key g; their scores, in that order, are the contracted dim
  of the values' product.
* columns of keys: the lane's words of a row, word by word.
* columns of values: row g is in the g-th eighth of a value's bytes.

Rows lie as the copy engine swizzles them: 128, 64 or 32 bytes.
"""

import dataclasses

from pallas_kernels.quantized_weight import WeightCode

# By bytes of a row. Of 8 keys, the first of lane t's pair is ``t times`` and the bits of t that a
# mask keeps: those of t = 0..3 are in different banks. The second differs in these bits.
FIRST_KEY = {128: (2, 0), 64: (1, 2), 32: (1, 0)}
FLIP = {128: 5, 64: 3, 32: 6}
SWIZZLE_SHIFT = {128: 0, 64: 1, 32: 2}  # the bits of a row's number that move its 16-byte chunks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeOrder:
    """Places within words, as ``Dequantizer.two`` takes them."""

    code: WeightCode

    @property
    def steps(self) -> int:
        """Products that a word of each of two rows is part of: it has two registers for each."""
        return 8 // self.code.bits

    def bytes_of(self, place: int) -> tuple[int, int]:
        """The two bytes of a word that a register is made of."""
        match self.code:
            case WeightCode.E4M3:
                return 1 - place, 3 - place
            case WeightCode.INT8:
                return 2 * place, 2 * place + 1
            case _:
                return place // 2, place // 2 + 2

    def is_high(self, place: int) -> bool:
        """Whether a register is of the second half of a head."""
        return self.code is WeightCode.INT4 and place % 2 == 1

    def selection(self, half: int) -> int:
        """Bytes ``2 half`` and the next of two keys' words, so that a register has both keys'."""
        in_turn = self.code is WeightCode.INT8
        return ((0x5140, 0x7362) if in_turn else (0x5410, 0x7632))[half]

    def byte_of(self, half: int, place: int) -> int:
        """The byte of the two keys' words that a register of the selection is of."""
        first, _ = self.bytes_of(place)
        return 2 * half + (first // 2 if self.code is WeightCode.INT8 else first)

    def key_words(self, row_bytes: int) -> int:
        """Words that a lane loads at a time, of a key's row."""
        return min(4, row_bytes // 16)

    def key_byte(self, word: int, row_bytes: int) -> tuple[int, int]:
        """Where a lane's word begins: a number, and what t is multiplied with."""
        at_a_time = self.key_words(row_bytes)
        return word // at_a_time * 16 * at_a_time + 4 * (word % at_a_time), 4 * at_a_time

    def value_column(self, register: int, width: int) -> int:
        """Where a row of values' products lies in its eighth of a value: those of 4 bits have two.

        Args:
            register: 2 for each product, of rows g and g + 8, in the order of ``value_places``.
        """
        word, half, place = self.value_places(width)[register]
        column = 4 * word + self.byte_of(half, place)
        return column + (width // 16 if self.is_high(place) else 0)

    def value_places(self, width: int) -> list[tuple[int, int, int]]:
        """Word of a lane, half of it and place, of every register of two keys' values."""
        words = width * self.code.bits // 256
        return [
            (word, half, place)
            for word in range(words)
            for half in range(2)
            for place in range(2 * self.steps)
        ]
