"""Configuration as plain frozen data: what the model is, and how the engine runs it."""

import dataclasses
from typing import Literal

from mtp_jax.errors import InvalidValueError

MAX_SPECULATIVE_TOKENS = 8
AUTO = "auto"  # num_speculative_tokens: as many drafts as measurements say that pay,
AUTO_DRAFTS = 3  # and at most so many: a fourth rarely does


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings (`rope_scaling` of config.json).

    `linear` divides every frequency by `factor`; `llama3` leaves high frequencies alone, divides
    low ones and blends between (`low_freq_factor`, `high_freq_factor`, `original_max_position`); `yarn`
    blends between the planes that turn `beta_slow` and `beta_fast` times over the original context, and
    scales attention scores by its `mscale` fields (DeepSeek).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one latent a token."""

    q_rank: int | None  # q_lora_rank; None: queries are projected at once (Moonlight)
    kv_rank: int  # kv_lora_rank
    nope_dim: int  # qk_nope_head_dim: features a head that are not rotated
    rope_dim: int  # qk_rope_head_dim: rotated features, of which all heads share one key
    v_dim: int  # v_head_dim
    interleaved: bool = True  # rope_interleave: checkpoints rotate features 2i and 2i + 1 together


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer (DeepSeek-V3.2): which `topk` positions a query attends to."""

    num_heads: int  # index_n_heads
    head_dim: int  # index_head_dim; its first `rope_dim` features are rotated
    topk: int  # index_topk
    owners: tuple[bool, ...]  # trunk layers with their own; others take the positions of an earlier one
    interleaved: bool = False  # indexer_rope_interleave
    share_in_drafts: bool = False  # index_share_for_mtp_iteration: drafts 2 to K reuse the first one's row


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture-of-experts ffn."""

    num_experts: int  # n_routed_experts or num_experts
    per_token: int  # num_experts_per_tok
    width: int  # moe_intermediate_size
    shared_width: int  # ffn columns that every token uses; 0: none
    sparse: tuple[bool, ...]  # trunk layers with experts; the others have a dense ffn
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"  # sigmoid chooses with a bias per expert (DeepSeek-V3)
    num_groups: int = 1  # n_group: the best `kept_groups` are chosen first
    kept_groups: int = 1  # topk_group
    normalise: bool = True  # norm_topk_prob: the chosen experts' weights add up to `scale`
    scale: float = 1.0  # routed_scaling_factor
    gated_shared: bool = False  # the shared expert has a sigmoid gate (Qwen3-Next)


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Gated delta nets in place of attention in some layers (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int  # linear_num_key_heads
    num_value_heads: int  # linear_num_value_heads
    key_width: int  # linear_key_head_dim
    value_width: int  # linear_value_head_dim
    conv_taps: int  # linear_conv_kernel_dim
    layers: tuple[bool, ...]  # trunk layers that have one; the others have attention
    gate: Literal["silu", "sigmoid"] = "silu"  # output_gate_type


@dataclasses.dataclass(frozen=True)
class BlocksConfig:
    """The indexer of grouped attention over blocks of tokens (Qwen4Exp): a query attends to the best ones.

    A block's key is the mean of its tokens' keys. Tokens behind the last whole block are always attended to.
    """

    num_heads: int  # indexer_n_heads
    head_dim: int  # indexer_head_dim; its first features are rotated, as many as of other heads
    budget: int  # indexer_budget: tokens in the blocks that a query chooses
    block: int  # indexer_compress_ratio: tokens of a block

    @property
    def positions(self) -> int:
        """Most positions that a query attends to."""
        return self.budget + self.block - 1


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """Residual streams with gates between them and each block (Qwen4Exp's hyper-connections)."""

    count: int  # hc_count
    rank: int  # hc_lowrank: of the gates' projection


@dataclasses.dataclass(frozen=True)
class NgramConfig:
    """The hashed n-gram embedding that one layer adds to the streams (Qwen4Exp).

    Rows of the table for n-grams of each order lie in `heads` parts of prime sizes; see `models/ngram.py`.
    """

    layer: int  # ple_layer_ids, less one
    order: int  # ngram_size: the longest n-grams; and the dilation of the convolution
    heads: int  # heads_per_ngram: rows of the table for the n-gram of each order
    width: int  # ple_embed_dim: of all rows together
    conv_taps: int  # ple_conv_kernel_size
    multipliers: tuple[int, ...]  # of the hash, one a token of an n-gram
    sizes: tuple[int, ...]  # rows of the table for each head
    rows: int  # of the whole table, which is filled up
    parts: int  # split_ngram_parts: tensors that the table is stored as
    eos: int  # n-grams do not reach behind this token

    @property
    def context(self) -> int:
        """Tokens before its own that a row of an n-gram depends on."""
        return self.order - 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder and of its MTP module. Field names follow Hugging Face's config.json."""

    model_type: str  # registry key: "llama", "qwen2", "mimo", "deepseek_v3", ...
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q, k and v only (Qwen2, MiMo, GLM-4.5)
    num_nextn_predict_layers: int = 0  # MTP modules in the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    rotary_dim: int | None = None  # features of a head that are rotated, the first ones; None: all
    qk_norm: bool = False  # RMS norm of each query and key head before rotation
    latent: LatentConfig | None = None  # None: grouped-query attention
    indexer: IndexerConfig | None = None  # None: attention over the whole context
    experts: ExpertsConfig | None = None  # None: a dense ffn in every layer
    delta: DeltaConfig | None = None  # None: attention in every layer
    blocks: BlocksConfig | None = None  # None: grouped attention is over the whole context
    streams: StreamsConfig | None = None  # None: one residual stream, and a norm before each block
    ngram: NgramConfig | None = None  # None: tokens have one embedding
    output_gate: bool = False  # attn_output_gate: attention's output times a sigmoid of a part of q_proj
    zero_centred_norms: bool = False  # norms are stored as their distance from one (but those of delta nets)

    @property
    def residual_width(self) -> int:
        """Features that a token has between layers."""
        return self.hidden_size * (self.streams.count if self.streams else 1)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. `engine.build` replaces some defaults by what suits model and device."""

    stages: int = 1  # Z: pipeline stages
    stage_layers: tuple[int, ...] | None = None  # layers of each stage; None: as the planner cuts them
    data: int = 1  # replicas of slots and pages
    tensor: int = 1  # shards of heads, ffn columns and vocabulary
    experts_over: Literal["tensor", "data-tensor"] = "tensor"  # which devices share a trunk layer's experts
    max_num_seqs: int = 16  # request slots, of all replicas together
    max_model_len: int = 2048  # tokens: prompt and completion together
    page_size: int = 16  # tokens a KV page
    num_pages: int = 1024  # KV pages of every layer's cache, in each replica
    num_speculative_tokens: int = 0  # K: drafts a round; 0 is plain decoding by the same code
    adaptive_drafts: bool = False  # make fewer drafts, down to none, where measurements say that it pays
    adaptive_start: int | None = None  # and begin with this many; None is K
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    prefill_chunk: int = 64  # prompt tokens a tick at most
    max_rounds: int = 1  # R: rounds of the ring a dispatch at most (a power of two up to 8)
    min_rows: int = 1  # rows a group at least; 2 on GPUs, where one row lowers to slow reductions
    min_table_tokens: int = 256  # smallest bucket of context length that is compiled for
    table_growth: int = 4  # factor from one bucket to the next: 2 wastes less attention, compiles more
    static_sampling: bool = False  # executables by kind of sampling: conditionals are slow on GPUs
    enable_prefix_caching: bool = True
    logprobs_mode: Literal["raw", "processed"] = "raw"  # of the model, or what was sampled from
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        positive = ("stages", "data", "tensor", "max_num_seqs", "max_model_len", "page_size", "num_pages")
        for name in (*positive, "prefill_chunk", "min_rows", "min_table_tokens"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "an integer of at least 1")
        self._check_stage_layers()
        if self.num_speculative_tokens not in range(MAX_SPECULATIVE_TOKENS + 1):
            legal = f"0 to {MAX_SPECULATIVE_TOKENS}"
            raise InvalidValueError("num_speculative_tokens", self.num_speculative_tokens, legal)
        if self.adaptive_start is not None and self.adaptive_start not in range(MAX_SPECULATIVE_TOKENS + 1):
            legal = f"None or 0 to {MAX_SPECULATIVE_TOKENS}"
            raise InvalidValueError("adaptive_start", self.adaptive_start, legal)
        if self.max_rounds not in (1, 2, 4, 8):
            raise InvalidValueError("max_rounds", self.max_rounds, "1, 2, 4 or 8")
        choices = {
            "table_growth": (2, 4),
            "experts_over": ("tensor", "data-tensor"),
            "draft_sampling": ("greedy", "probabilistic"),
            "logprobs_mode": ("raw", "processed"),
            "dtype": ("float32", "bfloat16", "float16"),
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise InvalidValueError(name, getattr(self, name), " or ".join(map(str, legal)))
        if self.page_size % 4:
            raise InvalidValueError("page_size", self.page_size, "a multiple of 4")

    def _check_stage_layers(self) -> None:
        counts = self.stage_layers
        if counts is None:
            return
        whole = all(type(count) is int and count > 0 for count in counts)
        if not whole or len(counts) != self.stages:
            legal = f"{self.stages} integers of at least 1, one for each of --stages"
            raise InvalidValueError("stage_layers", ",".join(map(str, counts)), legal)

    @property
    def initial_drafts(self) -> int:
        """Drafts a round to begin with."""
        start = self.adaptive_start if self.adaptive_drafts else None
        return self.num_speculative_tokens if start is None else min(start, self.num_speculative_tokens)

    @property
    def slots_per_replica(self) -> int:
        """Request slots of one replica. Slots are numbered replica by replica."""
        return self.max_num_seqs // self.data

    @property
    def rows_per_group(self) -> int:
        """Most rows that one of the Z groups of a replica's ring can hold."""
        return max(self.min_rows, -(-self.slots_per_replica // self.stages))

    @property
    def pages_per_slot(self) -> int:
        """Width of a full page table: pages that cover `max_model_len` tokens."""
        return -(-self.max_model_len // self.page_size)


def power_of_two_buckets(smallest: int, largest: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes that grow by `factor` from `smallest`, the last one cut to `largest`.

    >>> power_of_two_buckets(1, 6)
    (1, 2, 4, 6)
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def bucket_for(need: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `need`."""
    for size in buckets:
        if size >= need:
            return size
    raise AssertionError(f"{need} exceeds the largest bucket of {buckets}")
