"""The work of the GPU benchmark, done by PyTorch: torch.compile, fused AdamW, flash attention; see work_ours.py."""

from typing import Any

import torch
import torch_gpt
import transformers
from work_torch import Run, bert, bert_batch, versions, vit, vit_batch

__all__ = ["WARM_UP", "WORK", "versions"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def sizes(model: dict[str, Any]) -> torch_gpt.Sizes:
    return torch_gpt.Sizes(model["vocab_size"], model["max_length"], model["dim"], model["depth"], model["heads"])


def gpu_train(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    torch.set_float32_matmul_precision("high")
    module = torch_gpt.GPT(sizes(model)).to(DEVICE)
    optimizer = torch_gpt.make_optimizer(module, learning_rate=6e-4, fused=True)
    compiled = torch.compile(module)
    crops = torch.randint(model["vocab_size"], (batch, length + 1), device=DEVICE)

    def logits(input_ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return compiled(input_ids)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            torch_gpt.train_step(logits, optimizer, crops[:, :-1], crops[:, 1:])
        finish()

    return run, f"{DEVICE}, torch.compile, autocast, fused AdamW"


def gpu_forward(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    module = torch_gpt.GPT(sizes(model)).to(DEVICE, torch.bfloat16).eval()
    return forward(module, input_ids=torch.randint(model["vocab_size"], (batch, length), device=DEVICE))


def forward(module: torch.nn.Module, **inputs: torch.Tensor) -> tuple[Run, str]:
    compiled = torch.compile(module)

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            compiled(**inputs)
        finish()

    return run, f"{DEVICE}, torch.compile"


def train(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Run, str]:
    """A model of transformers, with its own loss."""
    torch.set_float32_matmul_precision("high")
    module, inputs = module.to(DEVICE).train(), {name: x.to(DEVICE) for name, x in inputs.items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    compiled = torch.compile(module)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = compiled(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        finish()

    return run, f"{DEVICE}, sdpa, torch.compile, autocast, fused AdamW"


def gpu_generate(batch: int, prompt: int, new: int, model: dict[str, Any]) -> tuple[Run, str]:
    config = transformers.GPT2Config(
        vocab_size=model["vocab_size"],
        n_positions=model["max_length"],
        n_embd=model["dim"],
        n_layer=model["depth"],
        n_head=model["heads"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    module = transformers.GPT2LMHeadModel(config).to(DEVICE, torch.bfloat16).eval()
    input_ids = torch.randint(model["vocab_size"], (batch, prompt), device=DEVICE)

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            module.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=new, do_sample=False)
        finish()

    return run, f"{DEVICE}, transformers generate"


def gpu_bert_train(batch: int, length: int, model: dict[str, int]) -> tuple[Run, str]:
    return train(bert(0.0, **model), bert_batch(batch, length))


def gpu_bert_forward(batch: int, length: int, model: dict[str, int]) -> tuple[Run, str]:
    inputs = bert_batch(batch, length)
    del inputs["labels"]
    module = bert(0.0, **model).to(DEVICE, torch.bfloat16).eval()
    return forward(module, **{name: x.to(DEVICE) for name, x in inputs.items()})


def gpu_vit_train(batch: int, model: dict[str, int]) -> tuple[Run, str]:
    return train(vit(**model), vit_batch(batch))


def gpu_vit_forward(batch: int, model: dict[str, int]) -> tuple[Run, str]:
    pixels = vit_batch(batch)["pixel_values"].to(DEVICE, torch.bfloat16)
    return forward(vit(**model).to(DEVICE, torch.bfloat16).eval(), pixel_values=pixels)


WORK = {
    "gpu_train": gpu_train,
    "gpu_forward": gpu_forward,
    "gpu_generate_1": gpu_generate,
    "gpu_generate_64": gpu_generate,
    "gpu_bert_train": gpu_bert_train,
    "gpu_bert_forward": gpu_bert_forward,
    "gpu_vit_train": gpu_vit_train,
    "gpu_vit_forward": gpu_vit_forward,
}
WARM_UP = {name: 5 for name in WORK if not name.startswith("gpu_generate")}
