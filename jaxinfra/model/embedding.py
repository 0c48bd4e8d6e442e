"""Token and learned position embeddings.

Dims: B batch, T position, D model width, V vocabulary, P table positions.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.model.execution import Execution


class Embedding(nnx.Module):
    """A table of rows, read by index.

    Args:
        matmul: whether activations are multiplied with it too, as logits are with a tied one.
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
        """The rows of these ids in the compute dtype; ids outside the table yield NaN."""
        return self.execution.kernels.lookup(
            self.table[...], ids_BT, rows_dim=self.rows_dim, policy=self.execution.policy
        )
