"""transformers reads the Swin checkpoints that we write, and computes with them what it computed before."""

import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from swin_reference import CLASSES, make  # noqa: E402
from vit_reference import LABELS, draw, to_torch  # noqa: E402

from transformers_jax.pretrained import from_pretrained, save_pretrained  # noqa: E402


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_reads_what_we_write(name, tmp_path):
    sizes = dict(image_size=[18, 26], patch_size=[2, 3], problem_type="multi_label_classification", drop_path_rate=0.3)
    reference, pixels = make(name, **sizes), to_torch(draw(18, 26))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert model.config.stochastic_depth == 0.3
    save_pretrained(model, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs"))
    assert {key: (x.shape, x.tobytes()) for key, x in ours.items()} == {
        key: (x.shape, x.tobytes()) for key, x in theirs.items()
    }
    auto = transformers.AutoModelForImageClassification if "Classification" in name else transformers.AutoModel
    back, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True, attn_implementation="eager")
    assert type(back).__name__ == name
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    known = dict(image_size=[18, 26], patch_size=[2, 3], window_size=3, depths=[2, 3], num_heads=[2, 3], embed_dim=12)
    known |= dict(mlp_ratio=1.5, drop_path_rate=0.3, layer_norm_eps=1e-3)
    for field, value in known.items():
        found = getattr(back.config, field)
        assert (list(found) if isinstance(found, tuple) else found) == value, field
    with torch.no_grad():
        output, expected = back(pixels), reference(pixels)
    if name == "SwinModel":
        assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(output.pooler_output, expected.pooler_output)
        return
    assert torch.equal(output.logits, expected.logits)
    assert back.config.id2label == {i: f"label {i}" for i in range(LABELS)}


def test_types_travel_along(tmp_path):
    reference = make("SwinForImageClassification", std=0.1).to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    back = transformers.SwinForImageClassification.from_pretrained(tmp_path / "ours")
    assert back.dtype == torch.bfloat16
    for key, value in reference.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


def test_a_processor_that_we_write_is_read(tmp_path):
    """As for the published checkpoints: resized to the size, bicubic, without cropping."""
    from transformers_jax.data import ImageProcessor

    ImageProcessor.default_of("swin", (20, 30)).save(tmp_path)
    config = transformers.image_processing_utils.BaseImageProcessor.get_image_processor_dict(tmp_path)[0]
    assert config["size"] == {"height": 20, "width": 30} and config["resample"] == 3
    assert not config.get("do_center_crop") and config["image_mean"] == [0.485, 0.456, 0.406]
