"""The decode loop, sampling and beam search, over anything that has a cache."""

from transformers_jax.generation.beam import BeamOutput, beam_search
from transformers_jax.generation.decode import Decoder, GenerateOutput, generate, stream
from transformers_jax.generation.sampling import Sampling

__all__ = ["BeamOutput", "Decoder", "GenerateOutput", "Sampling", "beam_search", "generate", "stream"]
