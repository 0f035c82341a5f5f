"""Eight simulated CPU devices, a compilation cache and run-time shape checks for the whole suite."""

import os
from pathlib import Path

# Most of the suite's time goes into compiling small programs. Many are the same in several tests and
# processes, and compiling them well takes longer than running them badly. In the environment, and before JAX is
# imported, so that the processes that tests start do the same.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache/transformers_jax/tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from jaxtyping import install_import_hook

# On a busy machine eight devices may wait long for one another; by default XLA gives up after 40 s, by abort().
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=600"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
install_import_hook("transformers_jax", "typecheck.check")


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file():
    """A compiled program takes memory and up to dozens of mappings, of which Linux allows a process 65,530: those of
    all files together end a worker by a segmentation fault."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data and reference outputs; it is not part of the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TRANSFORMERS_JAX_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}; set TRANSFORMERS_JAX_TEST_DATA")
    return folder
