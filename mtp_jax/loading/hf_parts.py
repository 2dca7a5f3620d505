"""Parts of `config.json` that some families have: latent attention, indexers, experts."""

from mtp_jax.config import (
    BlocksConfig,
    DeltaConfig,
    ExpertsConfig,
    IndexerConfig,
    LatentConfig,
    NgramConfig,
    StreamsConfig,
)
from mtp_jax.loading.hf_fields import Fields
from mtp_jax.models.ngram import hash_constants


def latent_config(fields: Fields) -> LatentConfig:
    """Multi-head latent attention. `head_dim` is no part of it, whatever it says (GLM-5 writes 192)."""
    rope = fields.integer("qk_rope_head_dim")
    if rope % 2:
        raise fields.fail("qk_rope_head_dim", "an even number")
    return LatentConfig(
        q_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope,
        v_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
    )


def indexer_config(fields: Fields, layers: int, model_type: str) -> IndexerConfig:
    """The lightning indexer, and which layers have one of their own.

    `indexer_types` says so if it is there, else `index_topk_pattern` ("F" or "S" a layer), else every
    `index_topk_freq`-th layer from `index_skip_topk_offset` on (GLM-5.2); by default every layer.
    """
    fields.integer("q_lora_rank")  # the indexer's queries are made of the latent
    width, rope = fields.integer("index_head_dim"), fields.integer("qk_rope_head_dim")
    if width < rope:
        raise fields.fail("index_head_dim", f"at least qk_rope_head_dim, {rope}")
    owners = _owners(fields, layers)
    if not owners[0]:
        raise fields.fail("indexer_types", "a first layer with an indexer: there is no earlier one to follow")
    return IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=width,
        topk=fields.integer("index_topk"),
        owners=owners,
        interleaved=fields.flag("indexer_rope_interleave", model_type == "glm_moe_dsa"),
        share_in_drafts=fields.flag("index_share_for_mtp_iteration"),
    )


def _owners(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.words("indexer_types", ("full", "shared"), layers)
    if types is not None:
        return tuple(kind == "full" for kind in types)
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str | list) or not set(pattern) <= {"F", "S"}:
            raise fields.fail("index_topk_pattern", "letters F (full) and S (shared), one a layer")
        return tuple(layer >= len(pattern) or pattern[layer] == "F" for layer in range(layers))
    every, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, least=0)
    return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def experts_config(fields: Fields, layers: int) -> ExpertsConfig:
    """The mixture of experts of DeepSeek-V3 and its relatives."""
    fields.must_be("scoring_func", ("sigmoid", None))
    fields.must_be("topk_method", ("noaux_tc", None))
    fields.must_be("moe_layer_freq", (1, None))
    count, groups = fields.integer("n_routed_experts"), fields.integer("n_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.fail(
            "n_group", f"a divisor of n_routed_experts, {count}, that leaves two experts a group"
        )
    kept = fields.integer("topk_group", groups, most=groups)
    chosen = fields.integer("num_experts_per_tok", most=count // groups * kept)
    width = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        width=width,
        shared_width=width * fields.integer("n_shared_experts", 0, least=0),
        sparse=_sparse_layers(fields, layers),
        num_groups=groups,
        kept_groups=kept,
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.words("mlp_layer_types", ("dense", "sparse"), layers)
    if types is not None:
        return tuple(kind == "sparse" for kind in types)
    dense = fields.integer("first_k_dense_replace", 0, least=0)
    return tuple(layer >= dense for layer in range(layers))


def qwen_experts_config(fields: Fields, layers: int) -> ExpertsConfig:
    """The mixture of experts of Qwen3-Next and Qwen3.5: weights are always normalised in the latter."""
    fields.must_be("decoder_sparse_step", (1, None))
    fields.must_be("mlp_only_layers", ([], None))
    count = fields.integer("num_experts")
    normalise = fields.values["model_type"] == "qwen3_5_moe" or fields.flag("norm_topk_prob", True)
    return ExpertsConfig(
        num_experts=count,
        per_token=fields.integer("num_experts_per_tok", most=count),
        width=fields.integer("moe_intermediate_size"),
        shared_width=fields.integer("shared_expert_intermediate_size"),
        sparse=(True,) * layers,
        scoring="softmax",
        normalise=normalise,
        gated_shared=True,
    )


def delta_config(fields: Fields, layers: int) -> DeltaConfig:
    """Gated delta nets: in these `layer_types`, else in all but each `full_attention_interval`-th layer."""
    kinds = ("linear_attention", "full_attention")
    types = fields.words("layer_types", kinds, layers)
    if types is None:
        every = fields.integer("full_attention_interval", 4)
        types = tuple(kinds[(layer + 1) % every == 0] for layer in range(layers))
    key_heads = fields.integer("linear_num_key_heads")
    value_heads = fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    return DeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_width=fields.integer("linear_key_head_dim"),
        value_width=fields.integer("linear_value_head_dim"),
        conv_taps=fields.integer("linear_conv_kernel_dim", least=2),
        layers=tuple(kind == kinds[0] for kind in types),
        gate="sigmoid" if fields.get("output_gate_type") == "sigmoid" else "silu",
    )


def blocks_config(fields: Fields, rotated: int) -> BlocksConfig | None:
    """The indexer over blocks of tokens; None: full attention layers have none."""
    if fields.get("indexer_n_heads") is None:
        return None
    fields.must_be("indexer_kv_heads", (1,))
    width, block = fields.integer("indexer_head_dim"), fields.integer("indexer_compress_ratio")
    if width < rotated:
        raise fields.fail("indexer_head_dim", f"at least the rotated features of a head, {rotated}")
    return BlocksConfig(
        num_heads=fields.integer("indexer_n_heads"),
        head_dim=width,
        budget=fields.integer("indexer_budget", least=block) // block * block,
        block=block,
    )


def streams_config(fields: Fields) -> StreamsConfig:
    """Residual streams and the gates between them."""
    return StreamsConfig(fields.integer("hc_count", 4, least=2), fields.integer("hc_lowrank", 320))


def ngram_config(fields: Fields, layers: int) -> NgramConfig | None:
    """The hashed n-gram embedding, whose constants are computed as the published code does; None: none."""
    ids = fields.ids("ple_layer_ids")  # from one
    if not ids:
        return None
    first, *others = ids
    if others or not 1 <= first <= layers:
        raise fields.fail("ple_layer_ids", f"one layer, 1 to {layers}")
    order, heads = fields.integer("ngram_size", 3, least=2), fields.integer("heads_per_ngram", 8)
    width = fields.integer("ple_embed_dim", fields.integer("hidden_size"))
    if width % ((order - 1) * heads):
        raise fields.fail("ple_embed_dim", f"a multiple of {(order - 1) * heads}, the heads of all n-grams")
    base, seed = fields.integer("ngram_vocab_size_base", 20_000_000), fields.integer("seed", 1234, least=0)
    multipliers, sizes = hash_constants(fields.integer("vocab_size"), order, heads, base, seed)
    divisor, parts = (
        fields.integer("make_ngram_vocab_size_divisible_by", 128),
        fields.integer("split_ngram_parts", 512),
    )
    rows = -(-sum(sizes) // divisor) * divisor
    if rows % parts:
        raise fields.fail("split_ngram_parts", f"a divisor of the table's {rows} rows")
    ends = fields.ids("eos_token_id")
    if not ends:
        raise fields.fail("eos_token_id", "a token id, where n-grams end")
    return NgramConfig(
        layer=first - 1,
        order=order,
        heads=heads,
        width=width,
        conv_taps=fields.integer("ple_conv_kernel_size", 4, least=2),
        multipliers=multipliers,
        sizes=sizes,
        rows=rows,
        parts=parts,
        eos=next(iter(ends)),
    )
