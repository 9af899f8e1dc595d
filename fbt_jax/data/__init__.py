"""Data: source -> tokenizer -> document -> packed row -> global batch. Other rooms need only these names."""

from fbt_jax.data.packing import BestFitRows
from fbt_jax.data.pipeline import Data, is_prepared, load_tokenizer, open_data, prepare_sources, vocab_size
from fbt_jax.data.tokenizer import Tokenizer, resolved

__all__ = [
    'BestFitRows',
    'Data',
    'Tokenizer',
    'is_prepared',
    'load_tokenizer',
    'open_data',
    'prepare_sources',
    'resolved',
    'vocab_size',
]
