"""Tiny GPTs with stored weights."""

import numpy as np
import pytest
from tiny_gpt import ODD, TINY, gpt_from_hugging_face

from transformers_jax.models import GPTConfig, LanguageModel


@pytest.fixture(scope="session")
def goldens(request) -> dict[str, np.ndarray]:
    """What `tests/goldens/make_generation.py` stored: weights, and what PyTorch generated with them."""
    return dict(np.load(request.config.rootpath / "tests" / "goldens" / "generation.npz"))


def _stored(goldens, prefix: str, sizes: dict) -> LanguageModel:
    weights = {name.removeprefix(prefix): x for name, x in goldens.items() if name.startswith(prefix)}
    return gpt_from_hugging_face(weights, GPTConfig(**sizes))


@pytest.fixture(scope="session")
def tiny(goldens) -> LanguageModel:
    """2 layers, 32 wide, 40 tokens, 32 positions, weights of standard deviation 0.5."""
    return _stored(goldens, "tiny.", TINY)


@pytest.fixture(scope="session")
def odd(goldens) -> LanguageModel:
    """3 layers, nothing square, 80 positions."""
    return _stored(goldens, "odd.", ODD)
