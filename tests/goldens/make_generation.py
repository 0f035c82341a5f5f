"""Make generation.npz: random GPT-2s and what Hugging Face's `generate` (PyTorch) writes with them.

python tests/goldens/make_generation.py   (needs torch and transformers; made with torch 2.13.0, transformers 5.24.0)
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

PROMPTS = {"a": [5, 6, 7], "b": [9, 10, 11, 12, 13, 14, 15]}
BEAM_PROMPTS = {"a": [1, 2, 3], "b": [0, 1, 2, 3, 4, 0]}


def build(std: float, **sizes) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(initializer_range=std, bos_token_id=None, eos_token_id=None, **sizes)).eval()


def weights(model: GPT2LMHeadModel, prefix: str) -> dict[str, np.ndarray]:
    return {
        prefix + name: tensor.numpy() for name, tensor in model.state_dict().items() if name.startswith("transformer.")
    }


def generate(model: GPT2LMHeadModel, prompt: list[int], new: int, **options):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )
    return output.sequences[:, len(prompt) :].numpy(), output


def main() -> None:
    tiny = build(0.5, vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    odd = build(0.3, vocab_size=61, n_positions=80, n_embd=24, n_layer=3, n_head=3, n_inner=40)
    out = weights(tiny, "tiny.") | weights(odd, "odd.")
    for name, prompt in PROMPTS.items():
        tokens, output = generate(tiny, prompt, 8)
        out[f"greedy.{name}"] = tokens[0]
        out[f"logits.{name}"] = torch.cat(output.logits).numpy()
        out[f"penalty.{name}"] = generate(tiny, prompt, 20, repetition_penalty=1.7)[0][0]
        out[f"ngram.{name}"] = generate(tiny, prompt, 20, no_repeat_ngram_size=2)[0][0]
    out["greedy64"] = generate(odd, [3, 1, 4, 1, 5], 64)[0][0]
    for name, prompt in BEAM_PROMPTS.items():
        for penalty in (0, 1, 3):
            tokens, output = generate(
                tiny, prompt, 5, num_beams=4, length_penalty=float(penalty), num_return_sequences=4
            )
            out[f"beam.{name}.{penalty}"] = tokens
            out[f"beam_scores.{name}.{penalty}"] = output.sequences_scores.numpy()
    stop_ids = [29, 36, 10]
    out["beam_stop_ids"] = np.array(stop_ids)
    for name, early in (("false", False), ("true", True), ("never", "never")):
        tokens, output = generate(
            tiny, [1, 2, 3], 20, num_beams=3, early_stopping=early, num_return_sequences=3, eos_token_id=stop_ids
        )
        out[f"beam_stop.{name}"], out[f"beam_stop_scores.{name}"] = tokens, output.sequences_scores.numpy()
    np.savez_compressed(Path(__file__).with_name("generation.npz"), **out)
    for name, value in out.items():
        if not name.startswith(("tiny.", "odd.", "logits")):
            print(name, value.tolist())


if __name__ == "__main__":
    main()
