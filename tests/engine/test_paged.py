"""A decoder layer over the paged cache: its kernels, by their references, beside XLA's path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine import paged
from mtp_jax.engine.paged import PagedAttention, Segment, sink_pages
from mtp_jax.models.block import DecoderLayer, LayerKind
from mtp_jax.models.layers import Around, Cache, rope_tables
from pallas_kernels import few_rows
from pallas_kernels.decode_attention import decode_attention
from tests.parity.rig import TINY

PAGE = 4
PAGES = 12  # of rows; behind them the sink
# fp32 sums of at most 48 terms of size 1 in another order; a wrong row or place differs by 0.1 and more.
RTOL, ATOL = 1e-4, 1e-5


@pytest.mark.parametrize("bias", [False, True])
def test_layer_by_kernels_is_the_layer(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Three rows of two tokens: on both sides of a page's end, cut to one by its limit, and dead."""
    random = np.random.default_rng(4)
    config = dataclasses.replace(TINY, attention_bias=bias)

    def draw(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / shape[-1] ** 0.5, dtype)

    layer = DecoderLayer(config, LayerKind("grouped", "dense"), jnp.dtype("float32"), draw)
    table = jnp.arange(PAGES, dtype=jnp.int32).reshape(3, -1)
    starts, limits = jnp.array([3, 9, 5], jnp.int32), jnp.array([16, 10, 0], jnp.int32)
    segment = Segment(table, starts[:, None] + jnp.arange(2, dtype=jnp.int32), limits)
    attend = PagedAttention((segment,), PAGE)
    cache_shape = (PAGES + sink_pages(6, PAGE), PAGE, config.num_key_value_heads, config.head_dim)
    cache = draw(cache_shape, jnp.dtype("float32")), draw(cache_shape, jnp.dtype("float32"))
    x = draw((6, config.hidden_size), jnp.dtype("float32"))
    rope = rope_tables(attend.positions, config)

    def run(kernels: bool) -> tuple[jax.Array, Cache]:
        out, _, new = layer(x, None, cache, Around(rope, attend, kernels=kernels))
        return out, new

    want, want_cache = run(kernels=False)
    calls: list[str] = []

    def reference(name: str, op: functools.partial, *operands: jax.Array) -> object:
        calls.append(name)
        return op(*operands)

    for module, name, op in (
        (few_rows, "norm_qkv_rope", few_rows.norm_qkv_rope),
        (few_rows, "norm_swiglu", few_rows.norm_swiglu),
        (few_rows, "project_add", few_rows.project_add),
        (paged, "decode_attention", decode_attention),
    ):
        by_reference = functools.partial(op, implementation="reference")
        monkeypatch.setattr(module, name, functools.partial(reference, name, by_reference))
    out, new_cache = run(kernels=True)
    assert calls == ["norm_qkv_rope", "decode_attention", "project_add", "norm_swiglu", "project_add"]
    np.testing.assert_allclose(out, want, rtol=RTOL, atol=ATOL)
    for new, expected, old in zip(new_cache, want_cache, cache, strict=True):
        np.testing.assert_allclose(new[:PAGES], expected[:PAGES], rtol=RTOL, atol=ATOL)
        written = np.asarray(new != old).any(axis=(-2, -1))  # P page
        assert sorted(map(tuple, np.argwhere(written))) == [(0, 3), (1, 0), (6, 1)]
