"""The ways of computing attention, with examples and heads spread over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformers_jax.nn import Causal, Global, Local, attend
from transformers_jax.training.mesh import MeshConfig, make_mesh, on_mesh


@pytest.mark.parametrize("implementation", ["blockwise", "splash"])
@pytest.mark.parametrize("pattern", [Causal(), Local(20) | Global(2)], ids=str)
def test_a_mesh_changes_nothing(implementation, pattern):
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=(4, 128, heads, 8)), jnp.float32) for heads in (4, 2, 2)]
    mask = jnp.asarray(np.arange(128) < np.array([128, 100, 5, 77])[:, None])[:, None, None]
    segments = jnp.asarray(np.sort(random.integers(0, 3, (4, 128))))

    def loss(arrays, mask, segments, implementation):
        output = attend(*arrays, mask=mask, segment_ids=segments, pattern=pattern, implementation=implementation)
        return jnp.sum(output**2), output

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)
    expected = gradient(arrays, mask, segments, "plain")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    over = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    placed = [jax.device_put(x, over) for x in arrays], *(jax.device_put(x, rows) for x in (mask, segments))
    run = jax.jit(on_mesh(jax.grad(loss, has_aux=True), mesh), static_argnums=3)
    found = run(*placed, implementation)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, expected)
    text = run.lower(*placed, implementation).compile().as_text()
    assert "all-gather" not in text  # every device computes its own
