"""Llama, Qwen2 and Qwen3 in the terms of this model: their configuration, and where each of their tensors belongs.

Their matrices are (outputs, inputs), ours (inputs, outputs); of each layer they have one tensor, we one array over all.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fbt_jax.config_model import ModelConfig
from fbt_jax.errors import UserError
from fbt_jax.model.transformer import Transformer, init_params

FAMILIES = ('llama', 'qwen2', 'qwen3')
_MODULES = {
    'attention_norm': 'input_layernorm',
    'mlp_norm': 'post_attention_layernorm',
    'query': 'self_attn.q_proj',
    'key': 'self_attn.k_proj',
    'value': 'self_attn.v_proj',
    'output': 'self_attn.o_proj',
    'query_norm': 'self_attn.q_norm',
    'key_norm': 'self_attn.k_norm',
    'mlp_gate': 'mlp.gate_proj',
    'mlp_up': 'mlp.up_proj',
    'mlp_down': 'mlp.down_proj',
}
_TOP = {'embedding': 'model.embed_tokens.weight', 'head': 'lm_head.weight', 'final_norm': 'model.norm.weight'}
_BUFFER = 'rotary_emb.inv_freq'  # follows from the config; folders of older versions hold it
_DTYPES = ('F64', 'F32', 'F16', 'BF16')  # integers and float8 are quantised, their scales elsewhere
_NAMED = 4  # of each kind that a report lists


class Place(NamedTuple):
    """Where a tensor goes: the path of one of our arrays (of `layers`: a part of it), and the shape it comes in."""

    path: tuple[str, ...]
    shape: tuple[int, ...]


def model_config(theirs: dict[str, Any], where: str) -> ModelConfig:
    """The model of a `transformers` config, as a dict of its version 5, without feedback.

    Raises:
      UserError: another family, or something in it that this model has no place for.
    """

    def require(holds: bool, key: str, allowed: str) -> None:
        if not holds:
            raise UserError(f'--from={where}: its {key} is {theirs.get(key)!r}; only {allowed} can be imported')

    family = theirs.get('model_type')
    require(family in FAMILIES, 'model_type', ', '.join(FAMILIES))
    require(theirs['hidden_act'] in ('silu', 'swish'), 'hidden_act', 'silu')
    windowed = any(kind != 'full_attention' for kind in theirs.get('layer_types') or [])
    require(not windowed, 'layer_types', 'full attention')
    width, num_heads = theirs['hidden_size'], theirs['num_attention_heads']
    head_dim = theirs.get('head_dim') or width // num_heads
    biases: tuple[str, ...] = ()
    if family == 'qwen2':  # which reads neither key
        biases = ('query', 'key', 'value')
    elif theirs.get('attention_bias'):
        biases = ('query', 'key', 'value', 'output')
    if family == 'llama' and theirs.get('mlp_bias'):
        biases += ('mlp_gate', 'mlp_up', 'mlp_down')
    theta, scaling = _rope(theirs['rope_parameters'], where)
    return ModelConfig(
        vocab_size=theirs['vocab_size'],
        width=width,
        num_layers=theirs['num_hidden_layers'],
        num_heads=num_heads,
        num_kv_heads=theirs['num_key_value_heads'],
        mlp_width=theirs['intermediate_size'],
        window=0,
        full_attention_every=1,
        rope_theta=theta,
        rope_scaling=scaling,
        fusion='none',
        attention_head_dim=None if head_dim * num_heads == width else head_dim,
        head_gate=False,
        qk_norm=family == 'qwen3',
        post_norms=False,
        depth_scaling=False,
        biases=biases,
        tied_embedding=bool(theirs['tie_word_embeddings']),
        input_norm='fused',
        norm_epsilon=float(theirs['rms_norm_eps']),
    )


def _rope(theirs: dict[str, Any], where: str) -> tuple[float, tuple[float, ...]]:
    """theta, and `model.rope_scaling`."""
    names = {
        'default': (),
        'linear': ('factor',),
        'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
    }
    kind = theirs.get('rope_type', 'default')
    if kind not in names or theirs.get('partial_rotary_factor', 1) != 1:
        raise UserError(f'--from={where}: its rope_parameters are {theirs}; only {", ".join(names)} can be imported')
    return float(theirs['rope_theta']), tuple(float(theirs[name]) for name in names[kind])


def places(config: ModelConfig) -> dict[str, Place]:
    """{their name: where it goes} of all tensors of this model, those of an array in the order of the layers."""
    found: dict[str, Place] = {}
    shapes = jax.eval_shape(lambda: init_params(Transformer(config), jax.random.key(0)))
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(key.key for key in key_path)
        if path[0] != 'layers':
            shape = (config.vocab_size or 0, config.width) if path[0] in ('embedding', 'head') else leaf.shape
            found[_TOP[path[0]]] = Place(path, shape)
            continue
        shape = leaf.shape[:0:-1] if path[-1] == 'kernel' else leaf.shape[1:]
        kind = 'bias' if path[-1] == 'bias' else 'weight'
        for i in range(config.num_layers):
            found[f'model.layers.{i}.{_MODULES[path[-2]]}.{kind}'] = Place(path, shape)
    return found


class Weights:
    """The tensors of a folder's safetensors, one file or several with an index; read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Any] = {}
        for path in self._files():
            try:
                file = safe_open(path, 'flax')  # numpy's form knows no bfloat16
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f'--from={folder}: {path.name} cannot be read: {" ".join(str(error).split())}'
                ) from None
            for name in file.keys():  # noqa: SIM118
                if not name.endswith(_BUFFER):
                    dtype = file.get_slice(name).get_dtype()
                    if dtype not in _DTYPES:
                        told = f'{name} is stored as {dtype}; only {", ".join(_DTYPES)} can be imported'
                        raise UserError(f'--from={folder}: {told}')
                    if name in self.shapes:
                        raise UserError(f'--from={folder}: {name} is in several of its files')
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
                    self._file_of[name] = file

    def _files(self) -> list[Path]:
        index = self.folder / 'model.safetensors.index.json'
        if not index.is_file():
            single = self.folder / 'model.safetensors'
            if not single.is_file():
                raise UserError(f'--from={self.folder}: holds no model.safetensors, nor an index of several files')
            return [single]
        try:
            names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
            paths = [self.folder / Path(name).name for name in names]  # beside the index, wherever it points
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f'--from={self.folder}: {index.name} is no index: {error}') from None
        return paths

    def read(self, name: str) -> np.ndarray:
        """float32. UserError where a number of it is not finite: the logits of some texts would not show it."""
        with np.errstate(over='ignore'):  # of float64
            array = np.asarray(self._file_of[name].get_tensor(name)).astype(np.float32)
        if not np.all(np.isfinite(array)):
            raise UserError(f'--from={self.folder}: {name} holds numbers that are not finite')
        return array


def require_all(weights: Weights, wanted: dict[str, Place]) -> None:
    """UserError that tells what is missing, what nothing asks for, and what has another shape.

    A head beside a tied embedding may be there as long as the two are equal.
    """
    found = dict(weights.shapes)
    head, embedding = _TOP['head'], _TOP['embedding']
    if head in found and head not in wanted and embedding in found:
        if not np.array_equal(weights.read(head), weights.read(embedding)):
            raise UserError(f'--from={weights.folder}: tie_word_embeddings is true, but {head} is not {embedding}')
        del found[head]
    kinds = {
        'missing': [name for name in wanted if name not in found],
        'without a place': [name for name in found if name not in wanted],
        'of another shape': [
            f'{name} {found[name]} for {place.shape}'
            for name, place in wanted.items()
            if name in found and found[name] != tuple(place.shape)
        ],
    }
    report = [
        f'{len(names)} {kind}: {", ".join(names[:_NAMED])}{", ..." if len(names) > _NAMED else ""}'
        for kind, names in kinds.items()
        if names
    ]
    if report:
        raise UserError(f'--from={weights.folder}: its tensors are not those of its config; {"; ".join(report)}')


def params_of(config: ModelConfig, weights: Weights) -> dict[str, Any]:
    """The parameters, float32; rows that only pad the vocabulary are 0."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, place in places(config).items():
        names.setdefault(place.path, []).append(name)
    tree: dict[str, Any] = {}
    for path, theirs in names.items():
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = _array(config, weights, path, theirs)
    return tree


def _array(config: ModelConfig, weights: Weights, path: tuple[str, ...], names: list[str]) -> np.ndarray:
    if path[0] in ('embedding', 'head'):
        rows_vD = weights.read(names[0])
        return np.pad(rows_vD, ((0, config.padded_vocab_size - len(rows_vD)), (0, 0)))
    arrays = (weights.read(name) for name in names)
    if path[-1] == 'kernel':
        arrays = (np.ascontiguousarray(array.T) for array in arrays)
    return np.stack(list(arrays)) if path[0] == 'layers' else next(arrays)
