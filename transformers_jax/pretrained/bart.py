"""BART of transformers: Marian's layers with learned positions and a norm of what enters them.

What config.json and generation_config.json say of how to write is not part of a model here: of it, the tokens that
start and end a target are kept, and `forced_bos_token_id`, `forced_eos_token_id`, `no_repeat_ngram_size`, `num_beams`,
`length_penalty` and lengths are not. `generation` takes what it knows of these as arguments, and a forced first token
as part of the prompts.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from transformers_jax.models import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.pretrained import marian
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, under

OFFSET = 2
"""Rows of the tables of positions that no position uses."""

DEFAULTS = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
"""Values that transformers gives missing fields, where they are not Marian's."""

UNUSED = ("force_bos_token_to_be_generated", "save_step")
"""Settings of old files that no BART model reads, beside Marian's."""

EMBEDDINGS = tuple(
    rule
    for side in ("encoder", "decoder")
    for rule in (
        Rule(f"{side}.embed_positions.weight", f"{side}.positions.embedding"),
        *layer_norm(f"{side}.layernorm_embedding", f"{side}.embedding_norm"),
    )
)


def rules(config: EncoderDecoderConfig) -> Sequence[Rule]:
    return *marian.rules(config), *EMBEDDINGS


def read_config(fields: dict[str, Any]) -> EncoderDecoderConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our model cannot follow.
    """
    for name, value in DEFAULTS.items():
        fields.setdefault(name, value)
    for name in UNUSED:
        fields.pop(name, None)
    config = marian.read_config(fields)
    if config.target_vocab_size is not None:
        raise ValueError("config.json has two vocabularies; BART has one")
    return dataclasses.replace(config, positions="learned", position_offset=OFFSET, embedding_norm=True)


def write_config(config: EncoderDecoderConfig) -> dict[str, Any]:
    """The fields of config.json that are BART's own."""
    fields = marian.write_config(config)
    return {name: fields[name] for name in fields.keys() - {"share_encoder_decoder_embeddings", "decoder_vocab_size"}}


def configure(config: EncoderDecoderConfig, names: Collection[str]) -> EncoderDecoderConfig:
    """A file without a bias on the logits, such as those of the bare model, has none."""
    return dataclasses.replace(config, logits_bias="final_logits_bias" in names)


def fits(config: EncoderDecoderConfig) -> bool:
    """Whether transformers' BART computes what this configuration says."""
    return (
        marian.has_layers(config)
        and config.positions == "learned"
        and config.position_offset == OFFSET
        and config.embedding_norm
        and config.target_vocab_size is None
    )


BART = Family(
    model_type="bart",
    prefix="model.",
    backbone=EncoderDecoder,
    rules=rules,
    architectures=(
        Architecture("BartModel", None, under(EncoderDecoder, None), copies=marian.backbone_copies),
        Architecture(
            "BartForConditionalGeneration",
            Seq2SeqLanguageModel,
            under(EncoderDecoder, Seq2SeqLanguageModel),
            rules=marian.head_rules,
            copies=marian.copies,
            configure=configure,
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=(r"(encoder|decoder)\.version",),
    fits=fits,
)
