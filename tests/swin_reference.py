"""Odd-sized Swin of transformers with large random weights, for the tests that run PyTorch beside us."""

from typing import Any

import pytest
from vit_reference import LABELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = ("SwinModel", "SwinForImageClassification")


def make(name: str, *, seed: int = 0, std: float = 0.25, **fields: Any) -> Any:
    """A model of the class `name`: patches of 2 pixels, windows of 3 places, two stages, of which the second has an odd
    number of layers, unless `fields` say otherwise. A new one for each size of images: transformers' layers remember
    how they shrank their windows."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(embed_dim=12, depths=[2, 3], num_heads=[2, 3], window_size=3, mlp_ratio=1.5)
    sizes |= dict(image_size=24, patch_size=2, layer_norm_eps=1e-3, attn_implementation="eager")
    if "Classification" in name:
        sizes |= dict(id2label={i: f"label {i}" for i in range(LABELS)})
    model = getattr(transformers, name)(transformers.SwinConfig(**sizes | fields)).eval()
    for parameter, value in model.named_parameters():
        norm = "norm" in parameter and parameter.endswith("weight")
        torch.nn.init.normal_(value, 1.0 if norm else 0.0, 0.3 if norm else std)
    return model
