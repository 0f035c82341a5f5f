"""TensorFlow Datasets sets made for the tests, so that none comes from the network."""

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
