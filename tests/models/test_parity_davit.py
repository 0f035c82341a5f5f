"""DaViT against the image encoder of transformers' Florence-2, which is the same model with other settings."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from transformers.models.florence2.configuration_florence2 import Florence2VisionConfig  # noqa: E402
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone  # noqa: E402

from transformers_jax.pretrained import from_pretrained  # noqa: E402

TIMMS_NAMES = (
    (r"^convs\.0\.", "stem."),
    (r"^convs\.", "stages."),
    (r"^(stages\.\d+)\.(conv|norm)\.", r"\1.downsample.\2."),
    (r"^blocks\.(\d+)\.", r"stages.\1.blocks."),
    (r"\.conv([12])\.", r".cpe\1.proj."),
    (r"\.(window|channel)_attn\.", ".attn."),
    (r"\.ffn\.", ".mlp."),
)


def timms_name(name):
    for pattern, replacement in TIMMS_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def make():
    settings = Florence2VisionConfig(
        embed_dim=[8, 12, 16],
        depths=[1, 2, 1],
        num_heads=[2, 3, 4],
        num_groups=[2, 3, 4],
        window_size=4,
        patch_size=[7, 3, 3],
        patch_stride=[4, 2, 2],
        patch_padding=[3, 1, 1],
        patch_prenorm=[False, True, True],
        drop_path_rate=0.0,
    )
    settings._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = Florence2VisionBackbone(settings).eval()
    for name, parameter in reference.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name and name.endswith("weight")), 0.3)
    return reference


@pytest.mark.parametrize(("height", "width"), [(45, 70), pytest.param(64, 64, marks=pytest.mark.exhaustive)])
def test_features_are_those_of_florence(height, width, tmp_path):
    reference = make()
    norm = {"head.norm.weight": np.ones(16, np.float32), "head.norm.bias": np.zeros(16, np.float32)}  # timm's alone
    tensors = {timms_name(name): value.numpy() for name, value in reference.state_dict().items()}
    save_file(tensors | norm, tmp_path / "model.safetensors")
    arguments = dict(embed_dims=[8, 12, 16], depths=[1, 2, 1], num_heads=[2, 3, 4], window_size=4)
    content = dict(architecture="davit_base_fl", num_classes=0, model_args=arguments, pretrained_cfg={})
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = from_pretrained(tmp_path)

    pixels = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)
    with torch.no_grad():
        output = reference(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    expected = output.last_hidden_state.permute(0, 2, 3, 1).numpy()
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model, x: model.features(x))(model, pixels)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
