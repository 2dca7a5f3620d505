"""Families by `model_type`: which modules run them, and how checkpoint tensors become their leaves."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtp_jax.config import ModelConfig
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.layers import DecoderLayer
from mtp_jax.models.mtp import MimoMTP

Read = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight of a module: its path there, its shape, and the logical axes of the placement table."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    read: Callable[[Read, str], np.ndarray]  # (tensor reader, name prefix) -> the whole leaf


SUPPORTED = ("llama", "mimo", "qwen2")


def check_supported(config: ModelConfig) -> None:
    """Raises InvalidValueError where no family here runs the model."""
    if config.model_type not in SUPPORTED:
        raise InvalidValueError("config.json: model_type", config.model_type, " or ".join(SUPPORTED))


def make_layer(config: ModelConfig, dtype: jnp.dtype) -> nnx.GraphDef[DecoderLayer]:
    """The trunk layer's structure, without arrays."""
    return _structure(lambda: DecoderLayer(config, dtype, _abstract))


def make_mtp(config: ModelConfig, dtype: jnp.dtype) -> nnx.GraphDef[MimoMTP]:
    """The MTP module's structure, without arrays."""
    return _structure(lambda: MimoMTP(config, dtype, _abstract))


def _abstract(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _structure[M: nnx.Module](build: Callable[[], M]) -> nnx.GraphDef[M]:
    graphdef, _ = nnx.split(nnx.eval_shape(build, graph=False), graph=False)
    return graphdef


def layer_leaves(config: ModelConfig, *, kv_heads: str, ffn: str) -> tuple[Leaf, ...]:
    """Leaves of a `DecoderLayer`; `kv_heads` and `ffn` name the logical axes they are split along."""
    d, h, g, f = config.hidden_size, config.head_dim, config.num_key_value_heads, config.intermediate_size
    q = config.num_attention_heads // g

    def qkv(read: Read, prefix: str, kind: str) -> np.ndarray:
        parts = [read(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv"]
        tail = parts[0].shape[1:]
        grouped = [part.reshape(g, -1, h, *tail) for part in parts]
        return np.concatenate(grouped, axis=1)

    def whole(name: str, shape: tuple[int, ...]) -> Callable[[Read, str], np.ndarray]:
        return lambda read, prefix: read(prefix + name).reshape(shape)

    leaves = [
        Leaf(("input_norm",), (d,), (None,), whole("input_layernorm.weight", (d,))),
        Leaf(("qkv",), (g, q + 2, h, d), (kv_heads, None, None, None), lambda r, p: qkv(r, p, "weight")),
        Leaf(
            ("o",), (d, g, q, h), (None, kv_heads, None, None), whole("self_attn.o_proj.weight", (d, g, q, h))
        ),
        Leaf(("post_norm",), (d,), (None,), whole("post_attention_layernorm.weight", (d,))),
        Leaf(
            ("gate_up",),
            (2, f, d),
            (None, ffn, None),
            lambda r, p: np.stack([r(f"{p}mlp.gate_proj.weight"), r(f"{p}mlp.up_proj.weight")]),
        ),
        Leaf(("down",), (d, f), (None, ffn), whole("mlp.down_proj.weight", (d, f))),
    ]
    if config.attention_bias:
        bias = Leaf(("qkv_bias",), (g, q + 2, h), (kv_heads, None, None), lambda r, p: qkv(r, p, "bias"))
        leaves.append(bias)
    return tuple(leaves)


def mtp_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    """Leaves of a `MimoMTP`, named in checkpoints `model.mtp_layers.0.*`."""
    d = config.hidden_size

    def norm(name: str) -> Callable[[Read, str], np.ndarray]:
        return lambda read, prefix: read(f"{prefix}{name}.weight")

    own = (
        Leaf(("hidden_norm",), (d,), (None,), norm("hidden_layernorm")),
        Leaf(("token_norm",), (d,), (None,), norm("token_layernorm")),
        Leaf(("input_proj",), (d, 2 * d), ("mtp_out", None), norm("input_proj")),
        Leaf(("final_norm",), (d,), (None,), norm("final_layernorm")),
    )
    inner = layer_leaves(config, kv_heads="mtp_kv_heads", ffn="mtp_ffn")
    return own + tuple(dataclasses.replace(leaf, path=("layer", *leaf.path)) for leaf in inner)


def merge[M: nnx.Module](graphdef: nnx.GraphDef[M], leaves: Iterable[Leaf], arrays: Iterable[jax.Array]) -> M:
    """A module from its structure and its leaves' arrays, inside the jitted program."""
    state: dict = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        *inner, name = leaf.path
        place = state
        for key in inner:
            place = place.setdefault(key, {})
        place[name] = nnx.Param(array)
    return nnx.merge(graphdef, state)
