"""Odd-sized encoders of transformers with large random weights, for the tests that run PyTorch beside us."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, LABELS = 61, 13, 5
HEADS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")
HEADS += ("ForQuestionAnswering",)
FAMILIES = ("Bert", "Roberta", "DistilBert")
CLASSES = [family + head for family in FAMILIES for head in HEADS if head != "ForPreTraining" or family == "Bert"]


def make(name: str, *, seed: int = 0, std: float = 0.5, **fields: Any) -> Any:
    """A model of the class `name`, with positions for 17 tokens."""
    torch.manual_seed(seed)
    family = next(family for family in FAMILIES if name.startswith(family))
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, max_position_embeddings=17, attn_implementation="eager")
    if family == "DistilBert":
        sizes |= dict(dim=24, n_layers=3, n_heads=3, hidden_dim=40)
    else:
        sizes |= dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40)
        sizes |= dict(layer_norm_eps=1e-3, type_vocab_size=3)
    if family == "Roberta":
        sizes |= dict(max_position_embeddings=19)
    if name.endswith(("SequenceClassification", "TokenClassification")):
        sizes |= dict(id2label={i: f"label {i}" for i in range(LABELS)})
    config = getattr(transformers, family + "Config")(**sizes | fields)
    model = getattr(transformers, name)(config).eval()
    for parameter, value in model.named_parameters():
        norm = "norm" in parameter.lower() and parameter.endswith("weight")
        torch.nn.init.normal_(value, 1.0 if norm else 0.0, 0.3 if norm else std)
    return model


def draw(family: str, *, batch: int = 2, length: int = LENGTH, seed: int = 0) -> dict[str, np.ndarray]:
    """Token ids, none of them padding (RoBERTa's is 1), and token types where the family has them."""
    rng = np.random.default_rng(seed)
    inputs = {"input_ids": rng.integers(2, VOCAB, (batch, length)).astype(np.int32)}
    if not family.startswith("DistilBert"):
        inputs["token_type_ids"] = rng.integers(0, 3, (batch, length)).astype(np.int32)
    return inputs


def to_torch(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.tensor(value).long() for name, value in inputs.items()}


def logits_of(output: Any) -> Any:
    """The logits of any class of transformers as ours gives them."""
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
