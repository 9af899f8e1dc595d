"""Small Hugging Face folders as transformers itself makes them; importing it skips without the hf extra."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')
pytest.importorskip('safetensors')

from fbt_jax.data.tokenizer import BPE_FILE  # noqa: E402
from fbt_jax.interop import hf_import  # noqa: E402

transformers.utils.logging.disable_progress_bar()  # the lines that are looked at are ours alone
VOCAB_SIZE = 2048 + 8  # more rows than the tokenizer has ids, as Qwen's
LLAMA_3 = {
    'rope_type': 'llama3',
    'rope_theta': 5e3,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64,
}
SMALL = {
    'vocab_size': VOCAB_SIZE,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 96,
    'bos_token_id': 0,
    'eos_token_id': 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'a Llama': ('Llama', {'rms_norm_eps': 1e-5}),
    'a tied Llama with biases': ('Llama', {'tie_word_embeddings': True, 'attention_bias': True, 'mlp_bias': True}),
    'a Llama 3.1': ('Llama', {'rope_parameters': LLAMA_3, 'num_key_value_heads': 1}),
    'a Llama of wide heads': (
        'Llama',
        {'head_dim': 16, 'rope_parameters': {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e4}},
    ),
    'a Qwen2': ('Qwen2', {'tie_word_embeddings': True}),
    'a Qwen2 with keys it does not read': ('Qwen2', {'attention_bias': True, 'mlp_bias': True, 'hidden_act': 'swish'}),
    'a Qwen3': ('Qwen3', {'head_dim': 24}),
}


def make_model(family: str, changes: dict[str, Any]) -> Any:
    """Random everywhere, so that a tensor in the wrong place shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(**SMALL | changes)
    model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.5 if 'bias' in name else 0.15)
            if 'norm' in name:
                weight.uniform_(0.5, 1.5)
    return model


def make_folder(
    folder: Path, family: str = 'Llama', changes: dict[str, Any] | None = None, model: Any = None, **saving: Any
) -> Any:
    model = model or make_model(family, changes or {})
    model.save_pretrained(folder, **saving)
    bpe = Path(hf_import.__file__).parents[1] / 'data' / BPE_FILE
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe), bos_token='<|bos|>', eos_token='<|eos|>', clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    return model
