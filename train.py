"""Train a model: python train.py --config configs/gpt_python_docs.py [--FIELD VALUE ...]. See --help."""

import sys

from transformers_jax.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
