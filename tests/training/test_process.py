"""What a process sets before JAX computes."""

import jax
import jax.numpy as jnp

from transformers_jax.training.process import compiled_anew


def test_programs_are_compiled_anew_where_that_is_asked_for(tmp_path):
    """JAX reads the setting of its cache once: switching it off later does nothing by itself."""
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
    )
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def read_from_disk():
        before = len(hits)
        jax.jit(lambda x: jnp.sin(x) * 3 + 1).lower(jnp.ones(17)).compile()
        return len(hits) > before

    try:
        read_from_disk()  # it is there from now on
        jax.clear_caches()
        assert read_from_disk()
        with compiled_anew():
            jax.clear_caches()
            assert not read_from_disk()
        jax.clear_caches()
        assert read_from_disk()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        jax.monitoring.clear_event_listeners()
