"""The example learns, says so, and its model is the set model it claims to be."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_model.py"


def test_own_model_learns():
    """A short run: 200 of its 1,500 steps, half the batch. Guessing sorts none of 2,000 sets."""
    command = [sys.executable, EXAMPLE, "--steps", "200", "--batch-size", "64"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    finished = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    accuracy = re.search(r"sets sorted without a mistake: ([\d.]+) %", finished.stdout)
    assert accuracy and float(accuracy.group(1)) > 15, finished.stdout
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", finished.stdout)]
    assert losses[-1] < losses[0] < np.log(20)
    assert re.search(r"^\[\d+(, \d+)*\] -> \[\d+(, \d+)*\]$", finished.stdout, re.MULTILINE)


def test_own_model_sees_a_set():
    """Neither the order of the numbers nor those that the mask leaves out change the answer."""
    example = runpy.run_path(str(EXAMPLE))
    model = example["SetSorter"](dim=16, depth=2, heads=2, rngs=nnx.Rngs(0))
    batch = example["make_batch"](jax.random.key(0), 3)
    numbers, mask = batch["numbers"], batch["mask"]
    assert (batch["target"][0, : mask[0].sum()] == jnp.sort(numbers[0, : mask[0].sum()])).all()
    run = jax.jit(model.__call__)
    expected = run(numbers, mask)
    order = jnp.array([3, 0, 7, 1, 6, 5, 2, 4])
    np.testing.assert_allclose(run(numbers[:, order], mask[:, order]), expected, atol=1e-5)
    np.testing.assert_allclose(run(jnp.where(mask, numbers, 11), mask), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "count", "shown"),
    [
        ("blocks", 10, ("attend", "Stack", "TransformerLayer", "MultiHeadAttention", "stacked_mask", "unstack")),
        ("attention", 2, ("attend", "parse_pattern", "RollingKVCache")),
    ],
)
def test_the_pages_on_blocks_run(name, count, shown):
    """Every snippet of the page, one after the other; their asserts are what the page claims."""
    page = (EXAMPLE.parents[1] / "docs" / f"{name}.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(snippets) >= count
    names = {"__name__": "a_page"}
    for snippet in snippets:
        exec(compile(snippet, f"docs/{name}.md", "exec"), names)
    assert all(f"nn.{name}" in page for name in shown)
