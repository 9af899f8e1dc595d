"""A run as `load_run` gives it, of random weights: for what decodes, scores or exports one."""

from typing import Any, NamedTuple

from helpers import make_model, make_params

from fbt_jax.config import Config, DataConfig, PassesConfig
from fbt_jax.data.tokenizer import open_tokenizer


class Run(NamedTuple):
    model: Any
    params: Any
    config: Any
    tokenizer: Any
    step: int = 7
    trained_feedback: bool = True


def make_run(tokenizer: str = 'bytes', *, seq_len: int = 64, **changes: Any) -> Run:
    """`changes`: of the model, see `make_model`."""
    data = DataConfig(tokenizer=tokenizer, seq_len=seq_len, batch_size=2)
    text = open_tokenizer(data)
    model = make_model(**{'vocab_size': text.vocab_size} | changes)
    params = make_params(model)
    phases = 'constant_75_25_0' if 'fusion' in params else 'one_pass'
    config = Config(data=data, model=model.config, passes=PassesConfig(phases=phases))
    return Run(model, params, config, text, trained_feedback='fusion' in params)
