"""nanoGPT's model in PyTorch, written anew and as short as it goes: the peer of `transformers_jax.models.GPT`.

The same architecture number for number: pre-norm layers, biases everywhere, gelu's tanh form, tied embeddings, causal
`scaled_dot_product_attention`, no dropout. Used by the CPU and GPU benchmarks and by `reference_gpt.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT; the defaults are nanoGPT's recipe for a CPU."""

    vocab_size: int = 65
    length: int = 64
    dim: int = 128
    depth: int = 4
    heads: int = 4


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.qkv, self.output = nn.Linear(sizes.dim, 3 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.up, self.down = nn.Linear(sizes.dim, 4 * sizes.dim), nn.Linear(4 * sizes.dim, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head_dim)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.positions = nn.Embedding(sizes.length, sizes.dim)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.dim)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                smaller = (2 * sizes.depth) ** -0.5 if name.endswith(("output.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * smaller)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (batch, length, vocab) of `input_ids` (batch, length)."""
        x = self.embedding(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


def make_optimizer(model: nn.Module, *, learning_rate: float = 1e-3, **kind: bool) -> torch.optim.AdamW:
    """nanoGPT's AdamW: betas 0.9 and 0.99, weight decay 0.1 on matrices. `kind` is fused=True or foreach=True."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), **kind)


def random_crops(tokens: Tensor, batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels (batch_size, length) from random places of `tokens`, as nanoGPT draws them."""
    starts = torch.randint(len(tokens) - length, (batch_size,), generator=generator).tolist()
    crops = torch.stack([tokens[i : i + length + 1] for i in starts]).long()
    return crops[:, :-1], crops[:, 1:]


def train_step(
    logits_of: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor
) -> Tensor:
    """One update with gradients clipped to a norm of 1; returns the loss. `logits_of` is the model, or calls it."""
    logits = logits_of(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
