"""Generation with a trained GPT-2 (Shakespeare) equals what PyTorch wrote with it."""

import numpy as np
import pytest

from transformers_jax import from_pretrained
from transformers_jax.generation import Sampling, beam_search, generate, stream

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def trained(shared_data):
    directory = shared_data / "hf_trained" / "gpt2_shakespeare"
    return from_pretrained(directory), dict(np.load(directory / "golden.npz"))


def test_greedy_and_stream(trained):
    model, golden = trained
    prompt, expected = golden["greedy"][None, :3], golden["greedy"][3:].tolist()
    options = dict(max_new_tokens=len(expected), sampling=GREEDY, stop_ids=[0])
    assert generate(model, prompt, **options).tokens[0].tolist() == expected
    assert [int(token) for (token,) in stream(model, prompt, **options)] == expected


def test_left_padded_batch(trained):
    model, golden = trained
    ids, mask, expected = golden["leftpad_ids"], golden["leftpad_mask"], golden["leftpad_greedy"][:, 8:]
    output = generate(model, ids, mask, max_new_tokens=expected.shape[1], sampling=GREEDY, stop_ids=[0])
    assert output.tokens.tolist() == expected.tolist()


def test_beams(trained):
    model, golden = trained
    prompt, expected = golden["beam"][:1, :3], golden["beam"][:, 3:]
    output = beam_search(
        model, prompt, beams=4, max_new_tokens=expected.shape[1], num_return_sequences=4, stop_ids=[0]
    )  # fmt: skip
    assert output.tokens[0].tolist() == expected.tolist()
    np.testing.assert_allclose(output.scores[0], golden["beam_scores"], rtol=1e-5)
