"""Writes gpt2_tiny/: a random GPT-2 of odd sizes with what transformers and PyTorch compute with it.

Run from the repository's root, with the extra `parity`: python tests/goldens/make_gpt2_tiny.py
Last written with torch 2.13.0 and transformers 5.24.0.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent / "gpt2_tiny"


def main():
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=47,
        n_positions=73,
        n_embd=24,
        n_layer=3,
        n_head=3,
        n_inner=40,
        layer_norm_epsilon=1e-4,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():  # biases and norms too, and large enough that a mistake shows
        mean, std = (float(name.endswith("weight")), 0.2) if "ln_" in name else (0.0, 0.4)
        torch.nn.init.normal_(parameter, mean, std)
    model.save_pretrained(HERE)

    ids = torch.randint(0, 47, (2, 13))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, output_attentions=True)
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        mask[1, :1] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        greedy = model.generate(
            ids[:1, :5], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )  # fmt: skip
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {f"gradient/{name}": p.grad.numpy() for name, p in model.named_parameters()}
    np.savez_compressed(
        HERE / "outputs.npz",
        ids=ids.numpy().astype(np.int32),
        logits=output.logits.numpy(),
        hidden_states=torch.stack(output.hidden_states).numpy(),
        attention_weights=torch.stack(output.attentions).numpy(),
        mask=mask.numpy().astype(np.int32),
        padded_logits=padded.numpy(),
        greedy=greedy.numpy().astype(np.int32),
        loss=loss.detach().numpy(),
        **gradients,
    )


if __name__ == "__main__":
    main()
