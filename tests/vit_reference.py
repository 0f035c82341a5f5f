"""Odd-sized ViT and DeiT of transformers with large random weights, for the tests that run PyTorch beside us."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

LABELS, PATCH = 5, 3
CLASSES = ("ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassification")
CLASSES += ("DeiTForImageClassificationWithTeacher",)


def make(name: str, *, seed: int = 0, std: float = 0.4, pooler: bool = True, **fields: Any) -> Any:
    """A model of the class `name`, for square images of 12 pixels in patches of 3 unless `fields` say otherwise."""
    torch.manual_seed(seed)
    family = "ViT" if name.startswith("ViT") else "DeiT"
    sizes: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40)
    sizes |= dict(image_size=12, patch_size=PATCH, layer_norm_eps=1e-3, attn_implementation="eager")
    if "Classification" in name:
        sizes |= dict(id2label={i: f"label {i}" for i in range(LABELS)})
    config = getattr(transformers, family + "Config")(**sizes | fields)
    options = {} if pooler else {"add_pooling_layer": False}
    model = getattr(transformers, name)(config, **options).eval()
    for parameter, value in model.named_parameters():
        norm = "layernorm" in parameter and parameter.endswith("weight")
        torch.nn.init.normal_(value, 1.0 if norm else 0.0, 0.3 if norm else std)
    return model


def draw(height: int = 12, width: int = 12, *, channels: int = 3, batch: int = 2, seed: int = 0) -> np.ndarray:
    """Normalised pixels as ours take them."""
    return np.random.default_rng(seed).normal(size=(batch, height, width, channels)).astype(np.float32)


def to_torch(pixels: np.ndarray) -> Any:
    """As transformers takes them: channels first."""
    return torch.tensor(pixels.transpose(0, 3, 1, 2).copy())
