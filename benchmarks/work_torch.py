"""The work of the CPU benchmark, done by PyTorch (and transformers 5): see work_ours.py."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_gpt
import transformers
from torch import Tensor

Run = Callable[[int], None]


def versions(threads: int) -> str:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads"


def fastest_optimizer(make: Callable[[str], Run]) -> str:
    """Whichever of PyTorch's two AdamW is faster here."""
    seconds = {}
    for kind in ("fused", "foreach"):
        run = make(kind)
        run(5)
        begin = time.perf_counter()
        run(10)
        seconds[kind] = time.perf_counter() - begin
    return min(seconds, key=seconds.__getitem__)


def gpt_train(compiled: bool = False) -> tuple[Run, str]:
    sizes = torch_gpt.Sizes()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(65, (1_000_000,), generator=generator).to(torch.uint16)

    def make(kind: str, compiled: bool = False) -> Run:
        model = torch_gpt.GPT(sizes)
        optimizer = torch_gpt.make_optimizer(model, **{kind: True})
        called = torch.compile(model) if compiled else model

        def run(iterations: int) -> None:
            for _ in range(iterations):
                inputs, labels = torch_gpt.random_crops(tokens, 12, sizes.length, generator)
                torch_gpt.train_step(called, optimizer, inputs, labels).item()

        return run

    kind = fastest_optimizer(make)
    return make(kind, compiled), ("torch.compile, " if compiled else "") + f"{kind} AdamW"


def gpt2(**changes: float) -> torch.nn.Module:
    # No token ends a text, so that every generation is as long as it may be.
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=0, **changes)
    config._attn_implementation = "sdpa"
    return transformers.GPT2LMHeadModel(config)


def gpt2_batch(batch: int, length: int) -> Tensor:
    return torch.randint(50257, (batch, length), generator=torch.Generator().manual_seed(0))


def gpt2_train(batch: int, length: int) -> tuple[Run, str]:
    crops = gpt2_batch(batch, length + 1)
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    optimizer = torch_gpt.make_optimizer(model, learning_rate=6e-4, fused=True)

    def logits(input_ids: Tensor) -> Tensor:
        return model(input_ids, use_cache=False).logits

    def run(iterations: int) -> None:
        for _ in range(iterations):
            torch_gpt.train_step(logits, optimizer, crops[:, :-1], crops[:, 1:]).item()

    return run, "fused AdamW"


def gpt2_forward(batch: int, length: int) -> tuple[Run, str]:
    model, input_ids = gpt2().eval(), gpt2_batch(batch, length)

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            model(input_ids, use_cache=False)

    return run, "sdpa"


def gpt2_generate(batch: int, prompt: int, new: int, beams: int = 1) -> tuple[Run, str]:
    model, input_ids = gpt2().eval(), gpt2_batch(batch, prompt)
    mask = torch.ones_like(input_ids)

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            output = model.generate(
                input_ids, attention_mask=mask, max_new_tokens=new, do_sample=False, num_beams=beams
            )
            assert output.shape == (batch, prompt + new)

    return run, "sdpa"


def bert(dropout: float, dim: int = 768, depth: int = 12, heads: int = 12) -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
    )
    config._attn_implementation = "sdpa"
    return transformers.BertForMaskedLM(config)


def bert_batch(batch: int, length: int) -> dict[str, Tensor]:
    """Rows of `length / 2` to `length` tokens; labels at 15 % of the places, -100 elsewhere."""
    generator = torch.Generator().manual_seed(0)
    real = torch.linspace(length // 2, length, batch).long()
    labels = torch.full((batch, length), -100)
    for row in labels:
        row[torch.randperm(length // 2, generator=generator)[: round(0.15 * length)]] = 7
    return {
        "input_ids": torch.randint(30522, (batch, length), generator=generator),
        "attention_mask": (torch.arange(length) < real[:, None]).long(),
        "labels": labels,
    }


def bert_forward(batch: int, length: int) -> tuple[Run, str]:
    model, inputs = bert(0.0).eval(), bert_batch(batch, length)
    del inputs["labels"]

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            model(**inputs)

    return run, "sdpa"


def bert_train(batch: int, length: int, dropout: float = 0.0) -> tuple[Run, str]:
    run = train(bert(dropout).train(), bert_batch(batch, length))
    return run, "sdpa, fused AdamW, transformers' own loss over all logits"


def train(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

    return run


def vit(dim: int, depth: int, heads: int) -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        num_labels=1000,
        problem_type="single_label_classification",
    )
    config._attn_implementation = "sdpa"
    return transformers.ViTForImageClassification(config)


def vit_batch(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn((batch, 3, 224, 224), generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(1000, (batch,), generator=generator)}


def vit_forward(batch: int, **sizes: int) -> tuple[Run, str]:
    model, inputs = vit(**sizes).eval(), vit_batch(batch)
    del inputs["labels"]

    @torch.no_grad()
    def run(iterations: int) -> None:
        for _ in range(iterations):
            model(**inputs)

    return run, "sdpa"


def vit_train(batch: int, **sizes: int) -> tuple[Run, str]:
    return train(vit(**sizes).train(), vit_batch(batch)), "sdpa, fused AdamW"


def marian(**changes: Any) -> transformers.MarianConfig:
    return transformers.MarianConfig(
        vocab_size=37_000, pad_token_id=36_999, decoder_start_token_id=36_999, eos_token_id=0, scale_embedding=True,
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512, activation_function="swish",
        attn_implementation="sdpa", **changes,
    )  # fmt: skip


def translation_train(batch: int, length: int, dropout: float = 0.0) -> tuple[Run, str]:
    source, target = torch.randint(36_000, (2, batch, length), generator=torch.Generator().manual_seed(0))
    model = transformers.MarianMTModel(marian(dropout=dropout)).train()
    run = train(model, {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target})
    return run, "sdpa, fused AdamW, transformers' own loss"


def translation_beam(batch: int, length: int, beams: int, checkpoint: str) -> tuple[Run, str]:
    model = transformers.MarianMTModel.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    texts = {name: torch.from_numpy(ids).long() for name, ids in np.load(Path(checkpoint) / "texts.npz").items()}
    mask = torch.ones_like(texts["source"])

    @torch.no_grad()
    def translate() -> Tensor:
        return model.generate(
            texts["source"], attention_mask=mask, max_new_tokens=length, do_sample=False, num_beams=beams
        )

    same = int((translate()[:, 1:] == texts["target"]).all(1).sum())

    def run(iterations: int) -> None:
        for _ in range(iterations):
            assert translate().shape == (batch, length + 1)

    return run, f"sdpa, {same} of {batch} texts as ours"


WORK = {
    "gpt_train": gpt_train,
    "gpt_train_compiled": lambda: gpt_train(compiled=True),
    "gpt2_forward": gpt2_forward,
    "gpt2_generate": gpt2_generate,
    "gpt2_beam": gpt2_generate,
    "gpt2_train": gpt2_train,
    "bert_forward": bert_forward,
    "bert_train": bert_train,
    "vit_forward": vit_forward,
    "vit_train": vit_train,
    "translation_train": translation_train,
    "translation_beam": translation_beam,
}
WARM_UP = {"gpt_train": 20, "gpt_train_compiled": 20}
