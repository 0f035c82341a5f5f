"""Token embeddings and their use as the output layer."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from transformers_jax.nn.linear import matmul, normal_init
from transformers_jax.nn.sharding import BATCH, TENSOR, axis_size, constrain

_FEW_ROWS = 32  # To spread a table of token types would cost more than the table: an exchange of what is looked up.


def take_rows(table: Float[Array, "rows dim"], index: Int[Array, "*lead"]) -> Float[Array, "*lead dim"]:
    """The rows of `table` at `index`; NaN for an index below 0 or beyond the table.

    `jnp.take` would count negative ones from the end: the label -100, read as a token, would silently be some word.
    """
    return table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class TokenEmbedding(nnx.Module):
    """A learned vector for each of `vocab_size` tokens; `read_out` uses the same vectors as an output layer."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        embedding_init: Initializer = normal_init(0.02),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.embedding = nnx.Param(embedding_init(rngs.params(), (vocab_size, dim), param_dtype))
        self.dtype = dtype

    def __call__(self, input_ids: Int[Array, "batch length"]) -> Float[Array, "batch length dim"]:
        """The vectors of `input_ids`. An id outside the vocabulary gives NaN: JAX cannot raise while running."""
        # Cast what was taken, not the table: the gradient of a frequent token is then summed in the parameter's type
        # (a bfloat16 sum of ones stops at 256).
        table = self.embedding[...]
        if len(table) <= _FEW_ROWS:
            table = constrain(table)
        else:
            table = constrain(table, None, TENSOR) if self._padding() else constrain(table, TENSOR)
        vectors = constrain(take_rows(table, input_ids), BATCH)
        return vectors if self.dtype is None else vectors.astype(self.dtype)

    def read_out(self, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
        """Scores of every token, `hidden @ embedding.T`, in float32 (Press and Wolf 2017: tied weights)."""
        table, padding = self.embedding[...].astype(hidden.dtype), self._padding()
        if padding:
            table = constrain(jnp.pad(constrain(table, None, TENSOR), ((0, padding), (0, 0))), None, TENSOR)
        scores = matmul(hidden, constrain(table, TENSOR).T, preferred_element_type=jnp.float32)
        scores = constrain(scores, BATCH, *[None] * (scores.ndim - 2), TENSOR)
        return scores[..., : len(self.embedding[...])] if padding else scores

    def _padding(self) -> int:
        """Rows that the table lacks to be divisible over the devices. It is stored without them, spread over its
        columns then, so that neither checkpoints nor optimizers know of the mesh."""
        return -self.embedding.shape[0] % axis_size(TENSOR)
