"""Tables whose rows are read by index: token embeddings, learned positions, the vocabulary.

Dims: B batch, T position, D model width.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.model.execution import Execution


class Embedding(nnx.Module):
    """An embedding table [rows, width], whose rows are read by index.

    Args:
        matmul: whether the table is also the weight of a matmul, as of tied logits.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        rows_dim: str,
        matmul: bool,
        model_dim: int,
        std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.execution = execution
        self.rows_dim = rows_dim
        param = execution.policy.param
        self.table = nnx.Param(
            std * jax.random.normal(rngs.params(), (num_rows, model_dim), param),
            axes=(rows_dim, axes.EMBED),
            matmul=matmul,
        )

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the rows of these ids in the compute dtype; NaN for ids outside the table."""
        return self.execution.kernels.lookup(
            self.table[...], ids_BT, rows_dim=self.rows_dim, policy=self.execution.policy
        )
