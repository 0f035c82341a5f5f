"""Against PyTorch and transformers, live: what they save we read, what we save they read, and the numbers agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from transformers_jax.data import ImageProcessor, Palette
from transformers_jax.generation import Sampling, generate
from transformers_jax.models import ImageGPT, LanguageModel, SequenceClassifier
from transformers_jax.pretrained import from_pretrained, load_image_processor, save_pretrained
from transformers_jax.pretrained.engine import export
from transformers_jax.pretrained.image_gpt import IMAGE_GPT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pil_image_gpt = pytest.importorskip("transformers.models.imagegpt.image_processing_pil_imagegpt")

CLOSE = dict(rtol=1e-5, atol=1e-5)
HEIGHT, WIDTH, CLUSTERS = 5, 7, 11


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def random_model(model_class="ImageGPTForCausalImageModeling", seed=3, std=0.2, **fields):
    """An odd-sized ImageGPT for pictures that are not square, with large random weights, biases and norms."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=CLUSTERS + 1, n_positions=HEIGHT * WIDTH, image_size=[HEIGHT, WIDTH], n_embd=30, n_layer=3)
    config = transformers.ImageGPTConfig(**sizes | dict(n_head=5, n_inner=52, layer_norm_epsilon=1e-3) | fields)
    model = getattr(transformers, model_class)(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, *((1.0, 0.2) if "ln_" in name else (0.0, std)))
    return model


@pytest.fixture(scope="module")
def ids():
    """Pictures after the start token."""
    ids = np.random.default_rng(0).integers(0, CLUSTERS, (3, HEIGHT * WIDTH)).astype(np.int32)
    ids[:, 0] = CLUSTERS
    return ids


@jax.jit
def forward(model, ids):
    return model(ids, capture=("hidden_states",))


def no_missing(info):
    return not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_hidden_states_logits_loss_and_gradients(tmp_path, ids, activation):
    reference = random_model(activation_function=activation)
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert isinstance(model, LanguageModel) and model.config.image_size == (HEIGHT, WIDTH)
    output = forward(model, jnp.asarray(ids))
    labels = torch.tensor(ids).long()
    expected = reference(torch.tensor(ids), output_hidden_states=True, labels=labels)
    np.testing.assert_allclose(output.logits, expected.logits.detach(), **CLOSE)
    states = np.concatenate([output.hidden_states, output.hidden[None]])
    np.testing.assert_allclose(states, torch.stack(expected.hidden_states).detach(), **CLOSE)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(model):
        log_probs = jax.nn.log_softmax(model(jnp.asarray(ids)).logits[:, :-1])
        return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean()

    loss, gradients = loss_and_gradients(model)
    expected.loss.backward()
    np.testing.assert_allclose(loss, expected.loss.detach(), rtol=1e-5)
    sizes, read = export(IMAGE_GPT, IMAGE_GPT.architecture("ImageGPTForCausalImageModeling"), gradients)
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    assert set(sizes) == set(theirs)
    for name, gradient in theirs.items():
        np.testing.assert_allclose(read(name), gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


def test_greedy_pixels_of_whole_pictures(tmp_path, ids):
    reference = random_model(std=0.35)
    reference.save_pretrained(tmp_path)
    given = ids[:, : 1 + 2 * WIDTH]
    settings = dict(max_new_tokens=3 * WIDTH)
    output = generate(from_pretrained(tmp_path), given, sampling=Sampling(temperature=0), **settings)
    mask = torch.ones(given.shape).long()  # transformers takes colour 0 for padding otherwise
    expected = reference.generate(
        torch.tensor(given).long(), attention_mask=mask, do_sample=False, pad_token_id=0, **settings
    )
    assert len(np.unique(output.tokens)) > 4
    np.testing.assert_array_equal(output.tokens, expected[:, -3 * WIDTH :])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_transformers_reads_what_we_write(tmp_path, ids, kind):
    reference = random_model(n_positions=36, image_size=None).to(getattr(torch, kind))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert model.config.image_size == 6  # without a word of its shape
    save_pretrained(model, tmp_path / "ours", max_shard_size="9KB")
    auto = transformers.ImageGPTForCausalImageModeling
    back, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True, dtype="auto")
    assert no_missing(info) and back.dtype == reference.dtype and type(back) is type(reference)
    with torch.no_grad():
        assert torch.equal(back(torch.tensor(ids)).logits, reference(torch.tensor(ids)).logits)


def test_backbone_alone(tmp_path, ids):
    reference = random_model("ImageGPTModel")
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert type(model) is ImageGPT
    with torch.no_grad():
        expected = reference(torch.tensor(ids)).last_hidden_state
    np.testing.assert_allclose(forward(model, jnp.asarray(ids)).hidden, expected, **CLOSE)
    save_pretrained(model, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in theirs.items()}
    back, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert no_missing(info)
    with torch.no_grad():
        assert torch.equal(back(torch.tensor(ids)).last_hidden_state, expected)


def test_image_classifier_reads_the_mean(tmp_path, ids):
    reference = random_model("ImageGPTForImageClassification", id2label={0: "x", 1: "y", 2: "z"})
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert isinstance(model, SequenceClassifier) and model.config.labels == ("x", "y", "z")
    with torch.no_grad():
        expected = reference(torch.tensor(ids)).logits
    np.testing.assert_allclose(forward(model, jnp.asarray(ids)).logits, expected, **CLOSE)
    save_pretrained(model, tmp_path / "ours")
    back, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert no_missing(info) and type(back) is type(reference)
    with torch.no_grad():
        assert torch.equal(back(torch.tensor(ids)).logits, expected)


@pytest.mark.parametrize("channels", [3, 1])
def test_tokens_of_pictures_are_those_of_its_image_processor(tmp_path, channels):
    rng = np.random.default_rng(0)
    colours = np.sort(rng.uniform(-1, 1, (CLUSTERS, channels)), axis=0)
    palette = Palette(tuple(map(tuple, colours.tolist())))
    half = (0.5,) * channels
    processor = ImageProcessor((6, 6), channels=channels, resize=(6, 6), mean=half, std=half, palette=palette)
    random_model(n_positions=36, image_size=None, num_channels=channels).save_pretrained(tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "ours", processor=processor)
    assert load_image_processor(tmp_path / "ours") == processor
    theirs = pil_image_gpt.ImageGPTImageProcessorPil.from_pretrained(tmp_path / "ours")
    for width, height in ((6, 6), (17, 9), (4, 31)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        image = image if channels == 3 else image.convert("L")
        expected = theirs(image.convert("RGB"), return_tensors="np")["input_ids"][0]
        np.testing.assert_array_equal(processor.ids(processor(image)), expected)


def test_a_model_without_its_palette_is_refused_where_pictures_are_needed(tmp_path):
    random_model(n_positions=36, image_size=None).save_pretrained(tmp_path)
    assert from_pretrained(tmp_path).config.clusters == CLUSTERS
    with pytest.raises(FileNotFoundError, match=r"there is no preprocessor_config\.json in"):
        load_image_processor(tmp_path)
    ImageProcessor((6, 6), resize=(6, 6)).save(tmp_path)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json has no clusters, the palette of an Image GPT"):
        load_image_processor(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(image_size=None), r"n_positions to 35, but pictures of 5 x 5 have 25 pixels; add \"image_size\""),
        (dict(image_size=[5, 6]), "n_positions to 35, but pictures of 5 x 6"),
        (dict(scale_attn_by_inverse_layer_idx=True), "sets scale_attn_by_inverse_layer_idx to True; only False"),
        (dict(add_cross_attention=True), "sets add_cross_attention to True"),
    ],
)
def test_what_we_do_not_compute_is_refused(tmp_path, fields, message):
    random_model(**fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
