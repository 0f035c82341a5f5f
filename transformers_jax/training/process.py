"""What a process should set before JAX computes its first number: the commands do, programs of your own may."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def prepare_process() -> None:
    """Keep compiled programs on disk, and on a machine without accelerators keep freed memory in the process.

    Compiled programs go to JAX_COMPILATION_CACHE_DIR, or to transformers_jax/compiled in the user's cache folder.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformers_jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if sys.platform == "linux" and not entry_points(group="jax_plugins"):
        _keep_freed_memory()


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Programs are compiled, and not read from the disk: one that is read prints none of the compiler's warnings."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]

    def use_cache(wanted: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", wanted)
        compilation_cache.reset_cache()  # JAX looks at the setting once only

    use_cache(False)
    try:
        yield
    finally:
        use_cache(before)


def _keep_freed_memory() -> None:
    """XLA's CPU backend allocates its temporary buffers for every call. By default glibc takes buffers above 32 MB from
    the kernel and gives them back each time, and the kernel clears every page: about a quarter of a small model's
    training step. Before the backend starts its threads, one arena for all of them can be asked for, too."""
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8  # of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(m_arena_max, 1)
        mallopt(m_mmap_threshold, 1 << 28)
        mallopt(m_trim_threshold, 1 << 29)
