"""Decode attention that writes its own tokens' keys and values, for Hopper, in Pallas Mosaic GPU.

The kernel of `pallas_kernels.paged_attention` with another beginning: it takes queries, keys and values as
one product leaves them, puts the new keys and values into the cache in place, and waits for that before it
asks for the blocks of keys that hold them. A share's warpgroup writes the tokens that lie in its share, so
none waits for another. A token's queries stand at a multiple of 8 columns; what stands between is never read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper import vary_like
from pallas_kernels.paged_attention import mosaic_gpu as paged
from pallas_kernels.paged_attention.mosaic_gpu import BLOCK_KEYS, COLUMN_GROUP, MASKED

MAX_COLUMNS = 64
MOST = float(jnp.finfo(jnp.bfloat16).max)
KEYS_A_SPLIT = 1024  # sharing costs two more kernels: what eight blocks more of keys cost

Ref = Any  # what Pallas passes to a kernel; its own annotations do not fit one another
_WGMMA = plgpu.Layout.WGMMA
_PER_QUERY = plgpu.Layout.WGMMA.reduce(0)
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


@dataclasses.dataclass(frozen=True)
class Tuning:
    """As paged_attention's."""

    stages: int | None = None
    splits: int | None = None
    keys_a_split: int = KEYS_A_SPLIT


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory and barriers of one warpgroup."""

    queries: Ref
    keys: Ref
    values: Ref
    new: Ref
    weights: Ref
    out: Ref
    queries_full: Ref
    keys_full: Ref
    values_full: Ref
    new_full: Ref
    top: Ref = None  # these two with several shares only
    total: Ref = None


def why_not(qkv: jax.Array, keys: jax.Array, tokens: int) -> str | None:
    """Why these shapes and dtypes cannot run here, or None. qkv [B * tokens, G, Q + 2, H]."""
    if not in_place.AVAILABLE:
        return f"it writes caches in place, which it cannot with JAX {jax.__version__}"
    if qkv.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"it takes bfloat16 rows and keys, got {qkv.dtype} and {keys.dtype}"
    if qkv.shape[-1] not in paged.HEAD_WIDTHS:
        return f"it takes heads of {paged.HEAD_WIDTHS}, got {qkv.shape[-1]}"
    if keys.shape[1] not in paged.PAGE_SIZES:
        return f"it takes pages of {paged.PAGE_SIZES} positions, got {keys.shape[1]}"
    if qkv.shape[2] > COLUMN_GROUP and qkv.shape[2] % COLUMN_GROUP:
        return f"TMA takes less than one tile of heads or whole ones: Q + 2 in eights, got {qkv.shape[2]}"
    columns = tokens * _columns(qkv.shape[2] - 2)
    if columns > MAX_COLUMNS:
        return f"its tokens' queries, in eights, may be at most {MAX_COLUMNS}, got {columns}"
    return None


def decode_attention(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    limit: jax.Array,
    *,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.decode_attention; shapes must have passed `why_not`."""
    tuning = tuning or Tuning()
    b, t = positions.shape
    _, g, per_group, width = qkv.shape
    page, per_kv = keys.shape[1], per_group - 2
    places = jnp.where(positions < jnp.minimum(limit, table.shape[1] * page)[:, None], positions, -1)
    # Eight columns a token, or more: limits are those of tokens.
    table, limits, blocks = paged._plan(table, positions, keys.shape[0], page, _columns(per_kv))
    splits = tuning.splits or paged._choose_splits(b * g, table.shape[1] * page, tuning.keys_a_split)
    stages = tuning.stages or paged._choose_stages(b * g * splits, width)
    columns = t * _columns(per_kv)
    out_type = [jax.ShapeDtypeStruct((b, splits, t, g, per_kv, width), qkv.dtype)]
    if splits > 1:
        out_type += [jax.ShapeDtypeStruct((b, splits, g, columns), jnp.float32)] * 2
    operands = (qkv, table, places.astype(jnp.int32), limits, blocks)
    operands = (*operands, keys, values)
    results = _kernel(out_type, page, stages, columns)(*operands)
    *parts, keys, values = vary_like(operands, *results)
    if splits == 1:
        return parts[0].reshape(b * t, g, per_kv, width), keys, values
    top, total = (x.reshape(b, splits, g, t, -1)[..., :per_kv].swapaxes(2, 3)[..., None] for x in parts[1:])
    return paged._join(parts[0], top, total).reshape(b * t, g, per_kv, width), keys, values


def _columns(per_kv: int) -> int:
    """Columns of one token's queries."""
    return -(-per_kv // COLUMN_GROUP) * COLUMN_GROUP


def _kernel(out_type: list[jax.ShapeDtypeStruct], page: int, stages: int, columns: int) -> Callable:
    """The kernel for these static sizes."""
    b, splits, t, g, _, width = out_type[0].shape
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    bf16, pages = jnp.bfloat16, BLOCK_KEYS // page
    scratch = {
        "queries": plgpu.SMEM((columns, width), bf16, transforms=tiles),
        "keys": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "values": plgpu.SMEM((stages, BLOCK_KEYS, width), bf16, transforms=tiles),
        "new": plgpu.SMEM((t, 2, width), bf16),
        "weights": plgpu.SMEM((columns, BLOCK_KEYS), bf16, transforms=tiles),
        "out": plgpu.SMEM((columns, width), bf16),
        "queries_full": plgpu.Barrier(num_arrivals=t),
        "keys_full": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "values_full": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "new_full": plgpu.Barrier(num_arrivals=t),
    }
    if splits > 1:
        scratch |= {name: plgpu.SMEM((columns,), jnp.float32) for name in ("top", "total")}
    return in_place.kernel(
        _attend,
        out_type,
        num_in_place=2,
        scratch_types=scratch,
        mesh=plgpu.Mesh(grid=(splits, g, b), grid_names=("split", "kv_head", "sequence")),
        name="decode_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _attend(qkv_g, table_g, places_g, limits_g, blocks_g, k_g, v_g, out_g, *sums_g, **scratch: Ref) -> None:
    """One sequence, one KV head, one share of the keys. The names with _g are in device memory."""
    shared = _Shared(**scratch)
    split, head, sequence = (lax.axis_index(name) for name in ("split", "kv_head", "sequence"))
    stages, _, width = shared.keys.shape
    columns, tokens = shared.queries.shape[0], places_g.shape[1]
    pages = BLOCK_KEYS // k_g.shape[1]
    own = columns // tokens
    for token in range(tokens):
        source = qkv_g.at[sequence * tokens + token, head]
        place = shared.queries.at[pl.ds(token * own, own)]
        plgpu.copy_gmem_to_smem(source.at[pl.ds(head * 0, own)], place, shared.queries_full)
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(source.shape[0] - 2, 2)], shared.new.at[token], shared.new_full
        )

    splits = out_g.shape[1]
    share = lax.div(blocks_g[sequence] + (splits - 1), jnp.int32(splits))
    first = split * share
    count = jnp.clip(blocks_g[sequence] - first, 0, share)

    def pages_of(block: jax.Array) -> tuple[jax.Array, ...]:
        column = (first + block) * pages
        return tuple(table_g[sequence, jnp.minimum(column + i, table_g.shape[1] - 1)] for i in range(pages))

    fetch_keys = functools.partial(paged._fetch, k_g, head, shared.keys, shared.keys_full)
    fetch_values = functools.partial(paged._fetch, v_g, head, shared.values, shared.values_full)
    ahead = [pages_of(jnp.int32(i)) for i in range(stages + 1)]
    limits = plgpu.load(limits_g.at[sequence], layout=_PER_QUERY, optimized=False)
    _write_new(shared, (k_g, v_g), table_g.at[sequence], places_g.at[sequence], head, (first, first + share))
    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch_keys, ahead[i], jnp.int32(i)))
        pl.when(i < count)(functools.partial(fetch_values, ahead[i], jnp.int32(i)))
    plgpu.barrier_wait(shared.queries_full)
    late_sum = columns <= paged.LATE_SUM_COLUMNS

    def step(block: jax.Array, carry: tuple):
        acc, top, total, own = carry
        stage = lax.rem(block, jnp.int32(stages))
        plgpu.barrier_wait(shared.keys_full.at[stage])
        scores = paged._scores(shared.keys.at[stage], shared.queries, limits - (first + block) * BLOCK_KEYS)
        new_top = jnp.maximum(top, scores.max(axis=0))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - paged._down(new_top, BLOCK_KEYS))
        if late_sum:
            total = total * paged._down(shrink, BLOCK_KEYS) + weights
        else:
            total = total * shrink + weights.sum(axis=0)
        shared.weights.T[...] = plgpu.layout_cast(weights.astype(jnp.bfloat16), _TRANSPOSED)
        plgpu.commit_smem()  # the weights are there for all, and all four warps are done with the keys
        more = block + stages < count
        pl.when(more)(functools.partial(fetch_keys, own, stage))
        plgpu.barrier_wait(shared.values_full.at[stage])
        mixed = paged._matmul(shared.values.at[stage].T, shared.weights.T, (width, columns))
        acc = acc * paged._down(shrink, width) + mixed
        plgpu.commit_smem()  # and now with the values
        pl.when(more)(functools.partial(fetch_values, own, stage))
        return acc, new_top, total, pages_of(block + stages + 1)

    terms = ((BLOCK_KEYS, columns), _WGMMA) if late_sum else ((columns,), _PER_QUERY)
    start = (
        paged._full(0.0, (width, columns), _WGMMA),
        paged._full(MASKED, (columns,), _PER_QUERY),
        paged._full(0.0, *terms),
    )
    acc, top, total, _ = lax.fori_loop(0, count, step, (*start, ahead[stages]))
    total = total.sum(axis=0) if late_sum else total
    acc = acc / paged._down(jnp.where(total == 0.0, 1.0, total), width)
    _write(shared, acc, top, total, out_g.at[sequence, split], head, [x.at[sequence, split] for x in sums_g])


def _write_new(shared: _Shared, caches_g, table_g, places_g, head, blocks) -> None:
    """Puts the new keys and values that lie in this share's `blocks` (first, end) into the cache; waits."""
    page = caches_g[0].shape[1]
    plgpu.barrier_wait(shared.new_full)
    new = plgpu.load(shared.new, optimized=False).astype(jnp.float32)
    shared.new[...] = jnp.where(new == new, jnp.clip(new, -MOST, MOST), 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()
    for token in range(places_g.shape[0]):
        place = places_g[token]
        block = lax.div(place, jnp.int32(BLOCK_KEYS))
        here = (place >= 0) & (block >= blocks[0]) & (block < blocks[1])

        @pl.when(here)
        def _(token=token, place=place) -> None:
            own = table_g[lax.div(place, jnp.int32(page))]
            for i, cache_g in enumerate(caches_g):
                target = cache_g.at[own, lax.rem(place, jnp.int32(page)), head]
                plgpu.copy_smem_to_gmem(shared.new.at[token, i], target)

    plgpu.wait_smem_to_gmem(0)


def _write(shared: _Shared, acc, top, total, out_g, head, sums_g) -> None:
    """Results [H, queries] to [T, G, Q, H] through shared memory, and of several shares what joins them."""
    tokens, _, per_kv, _ = out_g.shape
    own = shared.queries.shape[0] // tokens
    shared.out.T[...] = plgpu.layout_cast(acc.astype(jnp.bfloat16), _TRANSPOSED)
    if sums_g:
        shared.top[...], shared.total[...] = top, total
    plgpu.commit_smem()
    for token in range(tokens):
        plgpu.copy_smem_to_gmem(shared.out.at[pl.ds(token * own, per_kv)], out_g.at[token, head])
    for kept, kept_g in zip((shared.top, shared.total), sums_g, strict=False):
        plgpu.copy_smem_to_gmem(kept, kept_g.at[head])
    plgpu.wait_smem_to_gmem(0)
