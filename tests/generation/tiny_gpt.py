"""Tiny GPTs with the weights of Hugging Face's."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformers_jax.models import GPT, GPTConfig, LanguageModel


def gpt_from_hugging_face(weights: dict[str, np.ndarray], config: GPTConfig) -> LanguageModel:
    """A model with the tensors of a `GPT2LMHeadModel`, written down here once more, apart from the package's rules."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([weights[f"transformer.h.{i}.{name}"] for i in range(config.depth)])

    model = LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    backbone = model.backbone
    (layer,) = backbone.stack.layers
    pairs = [
        (backbone.embedding.embedding, weights["transformer.wte.weight"]),
        (backbone.positions.embedding, weights["transformer.wpe.weight"]),
        (backbone.norm.scale, weights["transformer.ln_f.weight"]),
        (backbone.norm.bias, weights["transformer.ln_f.bias"]),
    ]
    for norm, name in ((layer.attention_norm, "ln_1"), (layer.mlp_norm, "ln_2")):
        pairs += [(norm.scale, stacked(f"{name}.weight")), (norm.bias, stacked(f"{name}.bias"))]
    attention, mlp = layer.attention, layer.mlp
    for kind, ours in (("weight", "kernel"), ("bias", "bias")):
        query, key, value = np.split(stacked(f"attn.c_attn.{kind}"), 3, axis=-1)
        pairs += [
            (getattr(attention.query, ours), query),
            (getattr(attention.key, ours), key),
            (getattr(attention.value, ours), value),
            (getattr(attention.output, ours), stacked(f"attn.c_proj.{kind}")),
            (getattr(mlp.up, ours), stacked(f"mlp.c_fc.{kind}")),
            (getattr(mlp.down, ours), stacked(f"mlp.c_proj.{kind}")),
        ]
    for parameter, value in pairs:
        assert parameter[...].shape == value.shape
        parameter[...] = jnp.asarray(value)
    return model


TINY = dict(vocab_size=40, max_length=32, dim=32, depth=2, heads=4)
ODD = dict(vocab_size=61, max_length=80, dim=24, depth=3, heads=3, mlp_dim=40)
