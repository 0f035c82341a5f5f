"""Marian, BART and T5 against transformers: the same numbers from the same files, forwards and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flax import nnx  # noqa: E402

from transformers_jax.generation import Sampling, beam_search, generate  # noqa: E402
from transformers_jax.models import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel  # noqa: E402
from transformers_jax.pretrained import from_pretrained, save_pretrained  # noqa: E402
from transformers_jax.tasks import cross_entropy  # noqa: E402

torch.set_num_threads(1)
SOURCES = [[5, 17, 9, 23, 41, 2, 8], [11, 3, 30], [7, 7, 19, 12, 4]]  # of 7, 3 and 5 tokens
TARGETS = [[12, 9, 33, 4], [25, 8, 6, 1], [3, 44, 2, 10]]


def marian(**changes):
    settings = dict(
        vocab_size=53, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=40,
        activation_function="swish", scale_embedding=True, init_std=0.1, pad_token_id=52, eos_token_id=0,
        decoder_start_token_id=52, forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    return transformers.MarianMTModel(transformers.MarianConfig(attn_implementation="eager", **settings | changes))


def bart(**changes):
    settings = dict(
        vocab_size=53, d_model=24, encoder_layers=3, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=21, init_std=0.1,
        forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(attn_implementation="eager", **settings | changes)
    )


def t5(**changes):
    settings = dict(
        vocab_size=53, d_model=24, d_kv=7, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
        initializer_factor=1.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    config = transformers.T5Config(attn_implementation="eager", **settings | changes)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "marian": marian,
    "marian, two vocabularies": lambda: marian(
        share_encoder_decoder_embeddings=False, decoder_vocab_size=47, pad_token_id=46, decoder_start_token_id=46
    ),
    "bart": bart,
    "bart, scaled": lambda: bart(scale_embedding=True, activation_function="relu"),
    "t5": t5,
    "t5 v1.1": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """The reference, and ours from its files."""
    torch.manual_seed(0)
    reference = MODELS[request.param]().eval()
    with torch.no_grad():
        if request.param == "t5 v1.1":  # a read-out of its own, as the published files have
            reference.lm_head.weight = torch.nn.Parameter(torch.randn_like(reference.lm_head.weight))
        if request.param.startswith(("marian", "bart")):
            reference.final_logits_bias.normal_()
    reference.save_pretrained(tmp_path / "theirs")
    return reference, from_pretrained(tmp_path / "theirs"), tmp_path


def padded(rows, *, left=False, fill=1):
    width = max(map(len, rows))
    ids, mask = np.full((len(rows), width), fill, np.int32), np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return jnp.asarray(ids), jnp.asarray(mask)


def tensors(**arrays):
    """The same for PyTorch."""
    return {name: torch.tensor(np.asarray(array), dtype=torch.long) for name, array in arrays.items()}


def close(ours, theirs, tolerance=1e-5):
    theirs = theirs.detach().numpy()
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=tolerance * max(1.0, np.abs(theirs).max()))


def test_logits_hidden_states_and_weights_are_the_reference(pair):
    reference, model, _ = pair
    ids, mask = padded(SOURCES)
    targets = jnp.asarray(TARGETS)
    inputs = tensors(input_ids=ids, attention_mask=mask, decoder_input_ids=targets)
    expected = reference(**inputs, output_attentions=True, output_hidden_states=True)
    output = model(ids, mask, decoder_input_ids=targets, capture=("cross_attention_weights", "hidden_states"))
    close(output.logits, expected.logits)
    close(output.encoder_hidden[1, :3], expected.encoder_last_hidden_state[1, :3])
    close(output.cross_attention_weights, torch.stack(expected.cross_attentions))
    for ours, theirs in zip(output.hidden_states, expected.decoder_hidden_states, strict=False):
        close(ours, theirs)


def test_padding_of_a_source_on_either_side_changes_nothing(pair):
    _, model, _ = pair
    targets = jnp.asarray(TARGETS)
    alone = [model(jnp.asarray([row]), decoder_input_ids=targets[i : i + 1]).logits for i, row in enumerate(SOURCES)]
    for left in (False, True):
        ids, mask = padded(SOURCES, left=left)
        np.testing.assert_allclose(model(ids, mask, decoder_input_ids=targets).logits, np.concatenate(alone), atol=2e-4)


def test_loss_and_gradients_are_the_reference(pair):
    reference, model, tmp_path = pair
    ids, mask = padded(SOURCES)
    targets, labels = jnp.asarray(TARGETS), jnp.asarray(TARGETS)[:, ::-1].at[1, 2:].set(-100)
    reference.zero_grad()
    expected = reference(**tensors(input_ids=ids, attention_mask=mask, decoder_input_ids=targets, labels=labels))
    expected.loss.backward()

    def loss(model):
        total, weight = cross_entropy(model(ids, mask, decoder_input_ids=targets).logits, labels)
        return total / weight

    value, gradients = jax.value_and_grad(loss)(model)
    np.testing.assert_allclose(value, expected.loss.item(), rtol=1e-5)
    # Gradients go back through the same table of rules.
    save_pretrained(gradients, tmp_path / "gradients")
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    ours = type(reference).from_pretrained(tmp_path / "gradients")
    for name, parameter in ours.named_parameters():
        if name in theirs:
            close(parameter.detach().numpy(), theirs[name], 2e-5)


@pytest.mark.parametrize("beams", [1, 4])
def test_texts_and_scores_are_the_reference(pair, beams):
    reference, model, _ = pair
    ids, mask = padded(SOURCES)
    start = np.full((3, 1), model.config.start, np.int32)
    stop = model.config.eos_id
    settings = dict(max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_scores=True)
    expected = reference.generate(
        **tensors(input_ids=ids, attention_mask=mask), num_beams=beams, num_return_sequences=beams, **settings
    )
    conditioned = model.condition(ids, mask)
    theirs = expected.sequences.numpy()[:, 1:]
    if beams == 1:
        output = generate(
            conditioned, start, max_new_tokens=9, sampling=Sampling(temperature=0), stop_ids=[stop],
            pad_id=model.config.pad_id,
        )  # fmt: skip
        tokens = output.tokens
    else:
        output = beam_search(
            conditioned, start, beams=beams, max_new_tokens=9, num_return_sequences=beams, stop_ids=[stop],
            pad_id=model.config.pad_id,
        )  # fmt: skip
        tokens = output.tokens.reshape(-1, 9)
        np.testing.assert_allclose(output.scores.ravel(), expected.sequences_scores.numpy(), atol=1e-4)
    np.testing.assert_array_equal(tokens[:, : theirs.shape[1]], theirs)


def test_a_checkpoint_comes_back_byte_for_byte_and_loads_in_transformers(pair):
    reference, model, tmp_path = pair
    save_pretrained(model, tmp_path / "ours")
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
    again = from_pretrained(tmp_path / "ours")
    assert again.config == model.config
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    loaded = type(reference).from_pretrained(tmp_path / "ours").eval()
    ids, mask = padded(SOURCES)
    inputs = tensors(input_ids=ids, attention_mask=mask, decoder_input_ids=TARGETS)
    torch.testing.assert_close(loaded(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_a_bare_model_is_read_too(pair):
    _, model, tmp_path = pair
    bare = from_pretrained(tmp_path / "theirs", architecture=EncoderDecoder)
    ids, mask = padded(SOURCES)
    ours = bare(ids, mask, decoder_input_ids=jnp.asarray(TARGETS))
    whole = model.backbone(ids, mask, decoder_input_ids=jnp.asarray(TARGETS))
    np.testing.assert_array_equal(ours.hidden, whole.hidden)
    assert isinstance(model, Seq2SeqLanguageModel) and isinstance(model, nnx.Module)


def test_bart_without_a_bias_on_the_logits_reads_and_writes_what_the_reference_does(tmp_path):
    reference = bart().eval()
    reference.model.save_pretrained(tmp_path / "theirs")  # facebook/bart-large is such a file
    model = from_pretrained(tmp_path / "theirs", architecture=Seq2SeqLanguageModel)
    assert not model.config.logits_bias
    ids, mask = padded(SOURCES)
    inputs = tensors(input_ids=ids, attention_mask=mask, decoder_input_ids=TARGETS)
    close(model(ids, mask, decoder_input_ids=jnp.asarray(TARGETS)).logits, reference(**inputs).logits)
    save_pretrained(model, tmp_path / "ours")
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    bare = from_pretrained(tmp_path / "theirs")
    save_pretrained(bare, tmp_path / "bare")
    assert (tmp_path / "bare/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()


def test_a_forced_first_token_is_part_of_the_prompts(tmp_path):
    """As bart-large-cnn has it: every target starts with </s><s>."""
    reference = bart().eval()
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    ids, mask = padded(SOURCES)
    expected = reference.generate(
        **tensors(input_ids=ids, attention_mask=mask), forced_bos_token_id=0, max_new_tokens=9, do_sample=False
    )
    prompts = np.tile(np.array([[model.config.start, 0]], np.int32), (3, 1))
    output = generate(
        model.condition(ids, mask), prompts, max_new_tokens=8, sampling=Sampling(temperature=0), stop_ids=[2], pad_id=1
    )
    theirs = expected.numpy()[:, 2:]
    np.testing.assert_array_equal(output.tokens[:, : theirs.shape[1]], theirs)


@pytest.mark.parametrize("name", ["marian", "bart_base", "t5_small"])
def test_a_model_of_ones_own_writes_the_same_texts_in_transformers(name, tmp_path):
    """Its configuration says nothing of where targets start: with the padding, but for BART's."""
    sizes = dict(vocab_size=53, dim=24, depth=2, heads=3, max_length=40, init_std=0.2, pad_id=7, eos_id=None)
    config = getattr(EncoderDecoderConfig, name)(**sizes)
    model = Seq2SeqLanguageModel(EncoderDecoder(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    save_pretrained(model, tmp_path)
    ids, mask = padded(SOURCES)
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    theirs = reference.generate(
        **tensors(input_ids=ids, attention_mask=mask), max_new_tokens=6, do_sample=False, forced_eos_token_id=None
    )
    start = np.full((3, 1), config.start, np.int32)
    ours = generate(model.condition(ids, mask), start, max_new_tokens=6, sampling=Sampling(temperature=0))
    np.testing.assert_array_equal(np.concatenate([start, ours.tokens], axis=1), theirs.numpy())
