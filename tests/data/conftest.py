"""Sets of TensorFlow Datasets, and tokenizers, made for the tests, so that none comes from the network."""

import io
import json
from pydoc_data.topics import topics

import pytest


@pytest.fixture(scope="session")
def prepare_tfds(tmp_path_factory):
    """Writes a set with the given features and examples (a list for each split), and gives its `tfds:name`."""
    import tensorflow_datasets as tfds

    def prepare(class_name, features, examples):
        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        body = {
            "VERSION": tfds.core.Version("1.0.0"),
            "_info": _info,
            "_split_generators": lambda self, manager: {split: enumerate(rows) for split, rows in examples.items()},
            "_generate_examples": lambda self: (),
        }
        builder = type(class_name, (tfds.core.GeneratorBasedBuilder,), {"__module__": __name__, **body})
        folder = tmp_path_factory.mktemp("tfds")
        builder(data_dir=folder).download_and_prepare(file_format="array_record")
        tfds.core.add_data_dir(folder)
        return f"tfds:{builder.name}"

    return prepare


@pytest.fixture(scope="session")
def train_sentencepiece():
    """Writes a small sentencepiece model with the given options of its trainer."""
    import sentencepiece

    texts = [line for name in sorted(topics)[:20] for line in topics[name].splitlines() if line]
    texts += ["Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch: <s>warte</s> nur!"] * 5

    def train(path, **options):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            minloglevel=2,
            **{"vocab_size": 500, "character_coverage": 1.0} | options,
        )
        path.write_bytes(model.getvalue())

    return train


@pytest.fixture(scope="session")
def write_marian():
    """Writes a directory of Marian's tokenizer, with a vocabulary of the pieces of its models but every `without`th."""
    from sentencepiece import SentencePieceProcessor

    def write(folder, source, target, *, separate=False, without=7, **config):
        folder.mkdir(exist_ok=True)
        pieces = []
        for name, path in (("source.spm", source), ("target.spm", target)):
            (folder / name).write_bytes(path.read_bytes())
            processor = SentencePieceProcessor(model_file=str(path))
            pieces.append([processor.id_to_piece(i) for i in range(processor.vocab_size()) if i % without])
        special = ["</s>", "<unk>", ">>fra<<"]
        parts = pieces if separate else [pieces[0] + pieces[1]]
        for name, part in zip(("vocab.json", "target_vocab.json"), parts, strict=False):
            tokens = [*dict.fromkeys([*special, *sorted(part)]), "<pad>"]
            (folder / name).write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
        config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return write
