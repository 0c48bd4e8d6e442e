"""Which tokens a row's prompt has, and how often each was drawn since: what penalties read.

Dims: B batch, T token, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenHistory:
    """Counts of every row's tokens, kept on the device; donate it where it is replaced."""

    drawn_BV: Int[Array, "B V"]  # int32
    prompted_BV: Bool[Array, "B V"]

    @classmethod
    def empty(cls, *, batch: int, num_ids: int) -> "TokenHistory":
        """Rows without a token."""
        return cls(
            drawn_BV=jnp.zeros((batch, num_ids), jnp.int32),
            prompted_BV=jnp.zeros((batch, num_ids), bool),
        )

    def prompted(self, ids_BT: Int[Array, "B T"], counts_B: Int[Array, "B"]) -> "TokenHistory":
        """The history with a part of every row's prompt more.

        Args:
            counts_B: of the tokens without padding, which is on the right.
        """
        batch, length = ids_BT.shape
        is_token_BT = jnp.arange(length)[None] < counts_B[:, None]
        ids_BT = jnp.where(is_token_BT, ids_BT, self.drawn_BV.shape[1])
        rows_B1 = jnp.arange(batch)[:, None]
        prompted_BV = self.prompted_BV.at[rows_B1, ids_BT].set(True, mode="drop")
        return dataclasses.replace(self, prompted_BV=prompted_BV)

    def begin(
        self,
        row: Int[Array, ""],
        ids_T: Int[Array, "T"],
        *,
        num_prompt: Int[Array, ""],
        num_tokens: Int[Array, ""],
    ) -> "TokenHistory":
        """The history with a new sequence in a row, whatever was there before.

        Args:
            ids_T: the prompt, then tokens drawn already, where a sequence is begun again; padding.
            num_prompt, num_tokens: without those drawn, and with them.
        """
        place_T = jnp.arange(ids_T.size)
        num_ids = self.drawn_BV.shape[1]
        prompt_T = jnp.where(place_T < num_prompt, ids_T, num_ids)
        drawn_T = jnp.where((place_T >= num_prompt) & (place_T < num_tokens), ids_T, num_ids)
        prompted_V = jnp.zeros(num_ids, bool).at[prompt_T].set(True, mode="drop")
        drawn_V = jnp.zeros(num_ids, jnp.int32).at[drawn_T].add(1, mode="drop")
        return TokenHistory(
            drawn_BV=self.drawn_BV.at[row].set(drawn_V),
            prompted_BV=self.prompted_BV.at[row].set(prompted_V),
        )

    def after(self, ids_B: Int[Array, "B"], is_drawn_B: Bool[Array, "B"]) -> "TokenHistory":
        """The history with a token more in the rows that drew one; an id below 0 is none."""
        ids_B = jnp.where(is_drawn_B & (ids_B >= 0), ids_B, self.drawn_BV.shape[1])
        rows_B = jnp.arange(ids_B.size)
        return dataclasses.replace(
            self, drawn_BV=self.drawn_BV.at[rows_B, ids_B].add(1, mode="drop")
        )
