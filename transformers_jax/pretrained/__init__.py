"""Hugging Face checkpoints in and out, without PyTorch."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from transformers_jax.data import ImageProcessor
from transformers_jax.models import TokenClassifier
from transformers_jax.models.base import as_size
from transformers_jax.pretrained import engine
from transformers_jax.pretrained.bart import BART
from transformers_jax.pretrained.bert import BERT
from transformers_jax.pretrained.configs import CLASSIFIERS, give_labels, take_labels
from transformers_jax.pretrained.davit import DAVIT
from transformers_jax.pretrained.deit import DEIT
from transformers_jax.pretrained.distilbert import DISTILBERT
from transformers_jax.pretrained.engine import Loaded, Shardings
from transformers_jax.pretrained.files import (
    CONFIG,
    PREPROCESSOR,
    TensorFiles,
    find_directory,
    parse_size,
    read_json,
    write_json,
    write_tensors,
    written_at_once,
)
from transformers_jax.pretrained.gpt2 import GPT2
from transformers_jax.pretrained.image_gpt import IMAGE_GPT
from transformers_jax.pretrained.marian import MARIAN
from transformers_jax.pretrained.matching import choose_architecture
from transformers_jax.pretrained.roberta import ROBERTA
from transformers_jax.pretrained.rules import Architecture, Family
from transformers_jax.pretrained.swin import SWIN
from transformers_jax.pretrained.t5 import T5
from transformers_jax.pretrained.timm import from_timm, is_timm, processor_of, to_timm
from transformers_jax.pretrained.vit import VIT

__all__ = [
    "FAMILIES",
    "Loaded",
    "find_directory",
    "from_pretrained",
    "load_image_processor",
    "load_pretrained",
    "save_pretrained",
]

FAMILIES: tuple[Family, ...] = (GPT2, BERT, ROBERTA, DISTILBERT, VIT, DEIT, SWIN, DAVIT, MARIAN, BART, T5, IMAGE_GPT)

# fmt: off
WITHOUT_EFFECT = frozenset({
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "gradient_checkpointing", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "output_attentions", "output_hidden_states",
    "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "tie_encoder_decoder", "sep_token_id", "decoder_start_token_id", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "output_past", "language", "name", "sentence_transformers",
})
# fmt: on
"""Fields that transformers puts into every config.json and that do not change what the models here compute."""


@runtime_checkable
class SavesFiles(Protocol):
    """What a tokenizer or processor must do to be saved beside a model."""

    def save(self, directory: Path) -> object: ...


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    shardings: Shardings = None,
    architecture: str | type[nnx.Module] | None = None,
    new_head: bool = False,
    changes: Mapping[str, Any] | None = None,
    rngs: nnx.Rngs | None = None,
    revision: str | None = None,
) -> Any:
    """The model in a directory, or of a name on the Hugging Face hub, with the head that the checkpoint holds.

    `dtype` is the type of the computation and of the parameters, `param_dtype` that of the parameters alone; without
    them both are what the file has. Parameters go from the file into that type and to their devices one by one;
    `shardings` is one `jax.sharding.Sharding`, a pytree of them with the parameters' paths, or a function of path and
    `jax.ShapeDtypeStruct` (None: the default device).

    `architecture` asks for another head than the file's: a class of `transformers_jax.models` (`SequenceClassifier`, or
    `Bert` for none) or transformers' name of one ("BertModel"). A head that the file does not hold, or not of this
    size, is an error unless `new_head`, which starts it with `rngs` and logs which parameters are new. `changes` sets
    fields of the configuration otherwise (`{"dropout": 0.0, "labels": ("ham", "spam")}`); another `image_size`
    or `max_length` resizes what depends on it.

    FileNotFoundError when something is not there; ValueError when a file is damaged, a setting is not supported, or
    tensors and parameters do not match: the message lists every missing, unexpected or misshapen one.
    """
    return load_pretrained(
        source,
        dtype=dtype,
        param_dtype=param_dtype,
        shardings=shardings,
        architecture=architecture,
        new_head=new_head,
        changes=changes,
        rngs=rngs,
        revision=revision,
    ).model


def load_pretrained(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    shardings: Shardings = None,
    architecture: str | type[nnx.Module] | None = None,
    new_head: bool = False,
    changes: Mapping[str, Any] | None = None,
    rngs: nnx.Rngs | None = None,
    revision: str | None = None,
) -> Loaded:
    """`from_pretrained`, with the account of what was new and what was left out beside the model."""
    directory = find_directory(source, revision=revision)
    fields = _read_fields(directory)
    family = _family(fields.get("model_type"), directory)
    read = _read_config(family, fields, directory)
    named = next(iter(fields.get("architectures") or ()), None)
    with TensorFiles(directory) as files:
        kind = _name(dtype, engine.stored_type(files))
        wanted = dict(dtype=kind, param_dtype=_name(param_dtype, kind)) | dict(changes or {})
        names = family.names(files)

        def configured(chosen: Architecture) -> Any:
            config = _with_labels(read, chosen, fields, directory)
            _check_fixed(family, chosen, chosen.configure(config, names), f"{directory / CONFIG}: ")
            return _replace(chosen.configure(_replace(config, wanted), names), wanted)

        chosen = choose_architecture(
            family, read, files, asked=architecture, named=named, fits=lambda one: one.fits(configured(one))
        )
        config = configured(chosen)
        resizable: tuple[str, ...] = getattr(config, "RESIZABLE", ())
        return engine.load(
            family,
            chosen,
            config,
            files,
            held=dataclasses.replace(config, **{name: getattr(read, name) for name in resizable}),
            shardings=shardings,
            choose_head=architecture is not None,
            new_head=new_head,
            stored=next((one for one in family.architectures if one.name == named), None),
            rngs=rngs,
        )


def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    processor: SavesFiles | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write `model` as a checkpoint that `from_pretrained` and transformers (of a DaViT: timm) read: `config.json`,
    `model.safetensors` (several with an index beyond `max_shard_size`), a decoder's `generation_config.json` and the
    files of the `processor`, which is a tokenizer or an image processor.

    Parameters keep their types. Written aside and moved into `directory` at the end; a checkpoint that was there is
    replaced. ValueError when transformers has no such model, or it computes something else.
    """
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(model)):
        raise ValueError("the model lies over several processes; save a checkpoint and `convert` it in one process")
    limit = parse_size(max_shard_size)
    family, chosen = _layout(model)
    _check_fixed(family, chosen, model.config)
    sizes, read = engine.export(family, chosen, model)
    kind = jnp.result_type(*(leaf.dtype for leaf in engine.named_leaves(model).values())).name
    config = family.write_config(model.config) | give_labels(model.config, chosen.head)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    with written_at_once(Path(directory).expanduser()) as new:
        write_tensors(new, sizes, read, max_shard_size=limit)
        if hasattr(model, "init_cache"):
            write_json(new / "generation_config.json", special)
        if processor is not None:
            processor.save(new)
        header = {"model_type": family.model_type, "architectures": [chosen.name], "dtype": kind}
        write_json(new / CONFIG, to_timm(config, processor) if family.library == "timm" else config | header)


def load_image_processor(directory: Path) -> ImageProcessor | None:
    """The processor that a checkpoint of an image model comes with, or that its family has without one; None for a
    model of text. FileNotFoundError or ValueError for an Image GPT without its palette."""
    fields = _read_fields(directory)
    if fields.get("model_type") == IMAGE_GPT.model_type:
        processor = ImageProcessor.load(directory, channels=fields.get("num_channels", 3))
        if processor.palette is None:
            raise ValueError(f"{directory / PREPROCESSOR} has no clusters, the palette of an Image GPT")
        return processor
    if "image_size" not in fields:
        return None
    channels = fields.get("num_channels", 3)
    if (directory / PREPROCESSOR).is_file():
        return ImageProcessor.load(directory, channels=channels)
    if is_timm(said := read_json(directory / CONFIG)):
        try:
            return processor_of(said)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{directory / CONFIG}: {error}") from None
    size = fields["image_size"]
    return ImageProcessor.default_of(
        str(fields.get("model_type")), as_size(tuple(size) if isinstance(size, list) else size), channels
    )


def _read_fields(directory: Path) -> dict[str, Any]:
    """config.json as transformers would write it, be it its own or timm's."""
    fields = read_json(directory / CONFIG)
    try:
        return from_timm(fields) if is_timm(fields) else fields
    except (ValueError, TypeError) as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None


def _family(model_type: object, directory: Path) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    names = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"{directory / CONFIG} has model_type {model_type!r}, which is not supported; there are {names}")


def _layout(model: Any) -> tuple[Family, Architecture]:
    backbone: Any = getattr(model, "backbone", model)
    head, config = None if backbone is model else type(model), getattr(backbone, "config", None)
    for family in FAMILIES:
        if type(backbone) is family.backbone and family.fits(config):
            for architecture in family.architectures:
                if architecture.head is head and architecture.fits(config):
                    return family, architecture
    name = type(backbone).__name__ if head is None else f"{head.__name__}({type(backbone).__name__})"
    raise ValueError(f"transformers has no layout known here for {name}")


def _check_fixed(family: Family, architecture: Architecture, config: Any, where: str = "") -> None:
    everywhere = {name: () for name in ("patterns", "decoder_patterns") if hasattr(config, name)}
    for name, value in (everywhere | dict(family.fixed(config, architecture.head))).items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{where}{architecture.name} of {family.library} has {name}={value!r}, not {found!r}")


def _with_labels(config: Any, architecture: Architecture, fields: Mapping[str, Any], directory: Path) -> Any:
    if architecture.head not in CLASSIFIERS:
        return config
    try:
        problem_type = None if architecture.head is TokenClassifier else fields.get("problem_type")
        return dataclasses.replace(config, labels=take_labels(fields), problem_type=problem_type)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None


def _read_config(family: Family, fields: Mapping[str, Any], directory: Path) -> Any:
    left = dict(fields)
    try:
        config = family.read_config(left)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from None
    # A field unknown here may change what the model computes, unless it says that something is off.
    unknown = {
        name: value
        for name, value in left.items()
        if not (name in WITHOUT_EFFECT or name.startswith("_") or value in (None, False, "", [], {}))
    }
    if unknown:
        listed = ", ".join(f"{name}={value!r}" for name, value in sorted(unknown.items()))
        raise ValueError(
            f"{directory / CONFIG} sets {listed}, unknown for {family.model_type}; "
            "remove what does not change the model's numbers"
        )
    return config


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(changes) - set(names)):
        raise ValueError(f"{type(config).__name__} has no {', '.join(unknown)}; there are {', '.join(names)}")
    return dataclasses.replace(config, **changes)


def _name(dtype: DTypeLike | None, default: str) -> str:
    return default if dtype is None else jnp.dtype(dtype).name
