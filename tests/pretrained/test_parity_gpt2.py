"""Against PyTorch and transformers, live: what they save we read, what we save they read, and the numbers agree."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from transformers_jax.data.tokenizers import Tokenizer
from transformers_jax.pretrained import from_pretrained, save_pretrained
from transformers_jax.pretrained.configs import ACTIVATIONS
from transformers_jax.pretrained.engine import export
from transformers_jax.pretrained.gpt2 import GPT2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def random_gpt2(seed=3, model_class=None, **fields):
    """An odd-sized GPT-2 with large random weights, biases and norms."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=61, n_positions=79, n_embd=30, n_layer=3, n_head=5, n_inner=52, bos_token_id=3)
    config = transformers.GPT2Config(**sizes | dict(eos_token_id=7, layer_norm_epsilon=1e-3) | fields)
    model = (model_class or transformers.GPT2LMHeadModel)(config).eval()
    for name, parameter in model.named_parameters():
        mean, std = (float(name.endswith("weight")), 0.2) if "ln_" in name else (0.0, 0.35)
        torch.nn.init.normal_(parameter, mean, std)
    return model


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 61, (2, 17)).astype(np.int32)


@jax.jit
def forward(model, ids, mask=None):
    return model(ids, mask, capture=("hidden_states",))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_hidden_states_and_gradients(tmp_path, ids, tied):
    reference = random_gpt2(tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    output = forward(model, jnp.asarray(ids))
    expected = reference(torch.tensor(ids), output_hidden_states=True, labels=torch.tensor(ids).long())
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
    sizes, read = export(GPT2, GPT2.architecture("GPT2LMHeadModel"), gradients)
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    assert set(sizes) == set(theirs)
    for name, gradient in theirs.items():
        np.testing.assert_allclose(read(name), gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation_is_the_one_of_its_name(tmp_path, ids, activation):
    reference = random_gpt2(n_layer=1, activation_function=activation)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor(ids)).logits
    np.testing.assert_allclose(forward(from_pretrained(tmp_path), jnp.asarray(ids)).logits, expected, **CLOSE)


def test_greedy_tokens(tmp_path, ids):
    reference = random_gpt2()
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    expected = reference.generate(
        torch.tensor(ids[:, :6]).long(), max_new_tokens=64, do_sample=False, eos_token_id=None
    )
    step = jax.jit(lambda model, ids, last: model(ids).logits[:, last].argmax(-1))
    ours = jnp.pad(jnp.asarray(ids[:, :6]), ((0, 0), (0, 64)))
    for place in range(6, 70):
        ours = ours.at[:, place].set(step(model, ours, place - 1))
    assert len(np.unique(ours)) > 10
    np.testing.assert_array_equal(ours, expected)


def test_left_padding(tmp_path, ids):
    reference = random_gpt2()
    reference.save_pretrained(tmp_path)
    mask = np.ones_like(ids)
    mask[0, :9] = 0
    mask[1, :1] = 0
    positions = torch.tensor(np.maximum(mask.cumsum(-1) - 1, 0))
    with torch.no_grad():
        expected = reference(torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=positions).logits
        alone = reference(torch.tensor(ids[:1, 9:])).logits
    logits = forward(from_pretrained(tmp_path), jnp.asarray(ids), jnp.asarray(mask)).logits
    np.testing.assert_allclose(logits[mask == 1], expected[torch.tensor(mask) == 1], **CLOSE)
    np.testing.assert_allclose(logits[:1, 9:], alone, **CLOSE)


def test_padded_prompts_continue_as_each_does_alone(tmp_path):
    """Case G01: tokens that transformers generates for a seeded model, prompts padded on the left or not."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15]]
    ids = np.full((2, 15), 39, np.int32)  # what lies behind is not seen yet
    mask = np.ones_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, 7 - len(prompt) : 7] = prompt
        mask[row, : 7 - len(prompt)] = 0
    for place in range(7, 15):
        ids[:, place] = forward(model, jnp.asarray(ids), jnp.asarray(mask)).logits[:, place - 1].argmax(-1)
    np.testing.assert_array_equal(ids[:, 7:], [[36, 25, 19, 26, 25, 39, 10, 4], [22, 9, 12, 1, 6, 22, 36, 36]])
    for row, prompt in enumerate(prompts):
        alone = reference.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=39
        )  # fmt: skip
        np.testing.assert_array_equal(ids[row, 7:], alone[0, -8:])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_we_write(tmp_path, ids, kind, tied):
    reference = random_gpt2(tie_word_embeddings=tied).to(getattr(torch, kind))
    reference.save_pretrained(tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "ours", max_shard_size="9KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3
    back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert back.dtype == reference.dtype and type(back) is type(reference)
    assert (back.config.bos_token_id, back.config.eos_token_id) == (3, 7)
    with torch.no_grad():
        assert torch.equal(back(torch.tensor(ids)).logits, reference(torch.tensor(ids)).logits)
    generated = back.generate(torch.tensor(ids[:, :5]).long(), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= 9


def test_backbone_alone(tmp_path, ids):
    reference = random_gpt2(model_class=transformers.GPT2Model)
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = reference(torch.tensor(ids)).last_hidden_state
    np.testing.assert_allclose(forward(model, jnp.asarray(ids)).hidden, expected, **CLOSE)
    save_pretrained(model, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in theirs.items()}
    back, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(back(torch.tensor(ids)).last_hidden_state, expected)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_classifiers(tmp_path, ids, head):
    """Rows of several lengths, padded on the right; and on the left, where the oracle is the row alone."""
    model_class = getattr(transformers, f"GPT2For{head}")
    fields = {} if head == "QuestionAnswering" else {"id2label": {0: "x", 1: "y", 2: "z"}}
    reference = random_gpt2(model_class=model_class, pad_token_id=0, **fields)
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert model.config.labels == (() if head == "QuestionAnswering" else ("x", "y", "z"))
    mask = (np.arange(17) < np.array([[17], [6]])).astype(np.int32)
    padded = np.where(mask, np.maximum(ids, 1), 0).astype(np.int32)

    def expected_of(model, ids):
        with torch.no_grad():
            output = model(torch.tensor(ids).long())
        return torch.stack([output.start_logits, output.end_logits], -1) if head[0] == "Q" else output.logits

    expected = expected_of(reference, padded)
    logits = forward(model, jnp.asarray(padded), jnp.asarray(mask)).logits
    real = slice(None) if head[0] == "S" else mask == 1
    np.testing.assert_allclose(logits[real], expected.numpy()[real], **CLOSE)
    turned, alone = np.roll(padded[1:], 11, axis=1), expected_of(reference, padded[1:, :6])
    logits = forward(model, jnp.asarray(turned), jnp.asarray(np.roll(mask[1:], 11, axis=1))).logits
    np.testing.assert_allclose(logits if head[0] == "S" else logits[:, 11:], alone, **CLOSE)

    save_pretrained(model, tmp_path / "ours")
    auto = getattr(transformers, f"AutoModelFor{head}")
    back, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back) is model_class and back.config.id2label == reference.config.id2label
    assert torch.equal(expected_of(back, padded), expected)


def test_tokenizer_travels_along(tiny, tmp_path):
    text = "to be, or not to be: that is the question. " * 9
    tokenizer = Tokenizer.train_bpe([text], vocab_size=290)
    save_pretrained(from_pretrained(tiny), tmp_path / "ours", processor=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs(text)["input_ids"] == list(tokenizer.encode(text))
    assert theirs.decode(theirs(text)["input_ids"]) == text


def test_the_command_in_the_error_converts_pickled_weights(tiny, tmp_path):
    reference = transformers.GPT2LMHeadModel.from_pretrained(tiny)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"holds pytorch_model\.bin and no model\.safetensors; convert it") as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    command = str(error.value).split("installed: ")[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": path})
    theirs = load_file(tmp_path / "model.safetensors")
    save_pretrained(from_pretrained(tmp_path), tmp_path / "ours")
    for name, value in load_file(tmp_path / "ours" / "model.safetensors").items():
        np.testing.assert_array_equal(value, theirs[name])
