"""Data: source -> tokenizer -> document -> packed row -> global batch. Other rooms need only these names."""

from fbt_jax.data.pipeline import Data, load_tokenizer, open_data
from fbt_jax.data.tokenizer import Tokenizer

__all__ = ['Data', 'Tokenizer', 'load_tokenizer', 'open_data']
