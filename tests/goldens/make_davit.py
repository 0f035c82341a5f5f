"""Writes davit/: small random DaViTs as timm saves them, and what timm and PyTorch compute with them.

Run from the repository's root with timm on the path beside the extra `parity`, for example after
`pip install --no-deps --target DIRECTORY timm`: PYTHONPATH=DIRECTORY python tests/goldens/make_davit.py
timm imports torchvision for its data sets and a batch norm, of which nothing is needed here and which does not go with
every torch: an empty stand-in takes its place. Last written with torch 2.13.0 and timm 1.0.31.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent / "davit"


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())

import numpy as np  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from timm.models._hub import save_for_hf  # noqa: E402

MODELS = {
    "tiny": ("davit_tiny", dict(embed_dims=(6, 8, 12, 16), num_heads=(2, 2, 3, 4), depths=(1, 2, 1, 1))),
    "florence": ("davit_base_fl", dict(embed_dims=(6, 8, 12), num_heads=(2, 4, 3), depths=(1, 1, 1), window_size=5)),
}
SIZES = ((64, 64), (60, 60), (96, 96), (37, 61), (20, 23))
LABELS = 5


def main():
    for name, (architecture, sizes) in MODELS.items():
        torch.manual_seed(len(name))
        model = timm.create_model(architecture, num_classes=LABELS, **sizes).eval()
        for parameter_name, parameter in model.named_parameters():  # large enough that a mistake shows
            mean = float("norm" in parameter_name and parameter_name.endswith("weight"))
            torch.nn.init.normal_(parameter, mean, 0.2 if "norm" in parameter_name else 0.3)
        labels = {"label_names": [f"n{i}" for i in range(LABELS)]} if name == "tiny" else {}
        save_for_hf(model, HERE / name, safe_serialization=True, model_config=labels)

        rng, values = np.random.default_rng(0), {}
        for height, width in SIZES if name == "tiny" else SIZES[3:]:
            drawn = rng.integers(0, 256, (1, height, width, 3)).astype(np.uint8)
            pixels = torch.from_numpy((drawn / 255 * 2 - 1).astype(np.float32)).permute(0, 3, 1, 2)
            with torch.no_grad():
                last, stages = model.forward_intermediates(pixels)
                pooled = model.forward_head(last, pre_logits=True)
            model.zero_grad()
            logits = model(pixels)
            (logits * torch.arange(1, LABELS + 1)).sum().backward()
            size = f"{height}x{width}"
            values |= {f"{size}/pixels": drawn, f"{size}/pooled": pooled, f"{size}/logits": logits.detach()}
            values |= {f"{size}/stage{i}": stage.permute(0, 2, 3, 1) for i, stage in enumerate(stages)}
        values |= {f"gradient/{key}": parameter.grad for key, parameter in model.named_parameters()}  # of the last size
        np.savez_compressed(HERE / name / "outputs.npz", **{key: np.asarray(value) for key, value in values.items()})


if __name__ == "__main__":
    main()
