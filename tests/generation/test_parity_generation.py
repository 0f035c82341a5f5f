"""Generation against Hugging Face's, side by side."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_gpt import ODD, TINY, gpt_from_hugging_face

from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.generation.sampling import filter_logits
from transformers_jax.models import GPTConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAMES = dict(max_length="n_positions", dim="n_embd", depth="n_layer", heads="n_head", mlp_dim="n_inner")


def pair(std: float, sizes: dict, seed: int):
    torch.manual_seed(seed)
    named = {NAMES.get(name, name): value for name, value in sizes.items()}
    config = transformers.GPT2Config(initializer_range=std, bos_token_id=None, eos_token_id=None, **named)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    weights = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    return theirs, gpt_from_hugging_face(weights, GPTConfig(**sizes))


@pytest.fixture(scope="module", params=[0, 1])
def models(request):
    return pair(0.5, TINY, request.param)


def reference(model, prompt, new, **options):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=39,  # 0 would not do: Hugging Face's beam search takes it for none and pads with a stop id
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return output.sequences[:, len(prompt) :].numpy(), output


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_tokens_are_the_same_for_64_steps(seed):
    theirs, ours = pair(0.3, ODD, seed)
    prompts = np.random.default_rng(seed).integers(0, 61, (3, 9))
    output = generate(ours, prompts, max_new_tokens=64, sampling=Sampling(temperature=0))
    for row, prompt in enumerate(prompts.tolist()):
        assert output.tokens[row].tolist() == reference(theirs, prompt, 64)[0][0].tolist()


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.3),
        dict(repetition_penalty=0.7),
        dict(no_repeat_ngram_size=1),
        dict(no_repeat_ngram_size=3),
        dict(min_new_tokens=6),
        dict(repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=3),
    ],
)
def test_controls_give_the_same_tokens(models, options):
    theirs, ours = models
    prompts = np.random.default_rng(3).integers(0, 40, (4, 6))
    stop_ids = [36, 10, 22]
    sampling = Sampling(temperature=0, **options)
    output = generate(ours, prompts, max_new_tokens=20, sampling=sampling, stop_ids=stop_ids)
    for row, prompt in enumerate(prompts.tolist()):
        expected, _ = reference(theirs, prompt, 20, eos_token_id=stop_ids, **options)
        assert output.tokens[row, : output.lengths[row]].tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    "options", [dict(top_k=7), dict(top_p=0.8), dict(temperature=0.6), dict(temperature=1.7, top_k=20, top_p=0.9)]
)
def test_filters_keep_the_same_tokens(options):
    logits = np.random.default_rng(0).normal(0, 3, (16, 101)).astype(np.float32)
    expected = torch.tensor(logits)
    warpers = transformers.generation.logits_process
    if "temperature" in options:
        expected = warpers.TemperatureLogitsWarper(options["temperature"])(None, expected)
    if "top_k" in options:
        expected = warpers.TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = warpers.TopPLogitsWarper(options["top_p"])(None, expected)
    found = np.asarray(filter_logits(jnp.asarray(logits), Sampling(**options).knobs()))
    probabilities = torch.softmax(torch.tensor(found), dim=-1).numpy()
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected.numpy()))
    np.testing.assert_allclose(probabilities, torch.softmax(expected, dim=-1).numpy(), atol=1e-6)


@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_beam_search_with_stop_ids(models, early_stopping, length_penalty):
    theirs, ours = models
    rng = np.random.default_rng(5)
    prompts, stop_ids = rng.integers(0, 40, (5, 6)), rng.permutation(40)[:6].tolist()
    lengths = rng.integers(1, 7, 5)
    mask = (np.arange(6) >= 6 - lengths[:, None]).astype(np.int32)
    shared = dict(early_stopping=early_stopping, length_penalty=length_penalty, num_return_sequences=2)
    output = beam_search(ours, prompts, mask, beams=3, max_new_tokens=12, stop_ids=stop_ids, pad_id=39, **shared)
    for row in range(5):
        prompt = prompts[row, 6 - lengths[row] :].tolist()
        tokens, details = reference(theirs, prompt, 12, num_beams=3, eos_token_id=stop_ids, **shared)
        assert output.tokens[row, :, : tokens.shape[1]].tolist() == tokens.tolist()
        np.testing.assert_allclose(output.scores[row], details.sequences_scores.numpy(), rtol=2e-5)


def test_beam_search_with_controls(models):
    theirs, ours = models
    controls = dict(repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=4)
    output = beam_search(ours, [[4, 8, 15]], beams=4, max_new_tokens=12, stop_ids=[36, 3], pad_id=39, **controls)
    tokens, details = reference(theirs, [4, 8, 15], 12, num_beams=4, eos_token_id=[36, 3], **controls)
    assert output.tokens[0, 0, : tokens.shape[1]].tolist() == tokens[0].tolist()
    np.testing.assert_allclose(output.scores[0], details.sequences_scores.numpy(), rtol=2e-5)
