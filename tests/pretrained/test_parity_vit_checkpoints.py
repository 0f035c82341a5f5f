"""transformers reads the ViT and DeiT checkpoints that we write; a trained one gives the same predictions in both."""

import gzip

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from vit_reference import CLASSES, LABELS, draw, make, to_torch  # noqa: E402

from transformers_jax.models import ViT  # noqa: E402
from transformers_jax.pretrained import from_pretrained, load_pretrained, save_pretrained  # noqa: E402


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_reads_what_we_write(name, tmp_path):
    sizes = dict(image_size=[9, 15], patch_size=[3, 5], problem_type="multi_label_classification")
    reference, pixels = make(name, **sizes), to_torch(draw(9, 15))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", max_shard_size="9KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3
    ours = {}
    for path in (tmp_path / "ours").glob("model-*.safetensors"):
        ours |= load_file(path)
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert {key: x.tobytes() for key, x in ours.items()} == {key: x.tobytes() for key, x in theirs.items()}
    assert {key: x.shape for key, x in ours.items()} == {key: x.shape for key, x in theirs.items()}

    back, info = getattr(transformers, name).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tuple(back.config.image_size), tuple(back.config.patch_size)) == ((9, 15), (3, 5))
    with torch.no_grad():
        output, expected = back(pixels), reference(pixels)
    if name.endswith("Model"):
        assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(output.pooler_output, expected.pooler_output)
        return
    assert torch.equal(output.logits, expected.logits)
    assert back.config.id2label == {i: f"label {i}" for i in range(LABELS)}
    assert back.config.problem_type == "multi_label_classification" == model.config.problem_type


def test_auto_classes_find_it(tmp_path):
    for name, auto in (("ViTForImageClassification", "ForImageClassification"), ("DeiTModel", "")):
        make(name).save_pretrained(tmp_path / "theirs")
        save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
        back = getattr(transformers, "AutoModel" + auto).from_pretrained(tmp_path / "ours")
        assert type(back).__name__ == name


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassificationWithTeacher"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_types_travel_along(name, kind, tmp_path):
    reference = make(name, std=0.1).to(getattr(torch, kind))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert (model.config.dtype, model.config.param_dtype) == (kind, kind)
    save_pretrained(model, tmp_path / "ours")
    back = getattr(transformers, name).from_pretrained(tmp_path / "ours")
    assert back.dtype == reference.dtype
    for key, value in reference.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_masked_image_modeling_is_read_as_the_bare_model(family, tmp_path):
    reference = make(family + "ForMaskedImageModeling")
    reference.save_pretrained(tmp_path)
    start = family.lower() + "."
    loaded = load_pretrained(tmp_path, architecture=ViT)
    assert loaded.new == ()
    assert loaded.unused == ("decoder.0.bias", "decoder.0.weight", start + "embeddings.mask_token")
    with torch.no_grad():
        expected = getattr(reference, family.lower())(to_torch(draw())).last_hidden_state.numpy()
    with jax.default_matmul_precision("highest"):
        hidden = jax.jit(lambda model, x: model(x).hidden)(loaded.model, draw())
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_checkpoint_resized_here_is_what_transformers_computes_when_it_interpolates(tmp_path):
    reference = make("DeiTForImageClassification")
    reference.save_pretrained(tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs", changes={"image_size": (9, 21)}), tmp_path / "ours")
    back = transformers.DeiTForImageClassification.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        output = back(to_torch(draw(9, 21))).logits
        expected = reference(to_torch(draw(9, 21)), interpolate_pos_encoding=True).logits
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_a_trained_checkpoint_on_real_digits(shared_data):
    """Logits of 500 digits, and so the accuracy, are those of transformers."""
    folder, directory = shared_data / "mnist", shared_data / "hf_trained/vit_mnist"
    images = np.frombuffer(gzip.decompress((folder / "images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / "labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)[:500]
    pixels = ((images.reshape(-1, 28, 28, 1)[:500] / 255 - 0.5) / 0.5).astype(np.float32)
    reference = transformers.ViTForImageClassification.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = reference(to_torch(pixels)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(jax.jit(lambda model, x: model(x).logits)(from_pretrained(directory), pixels))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (logits.argmax(-1) == labels).mean() == (expected.argmax(-1) == labels).mean() > 0.9625
