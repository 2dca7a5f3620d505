"""From options to a running engine: resolve, plan memory, read, place, compile."""

import concurrent.futures
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.auto_layout import Devices, Merit, fill_layout, wants_layout
from mtp_jax.engine.buckets import BucketTable
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.executables import Executables
from mtp_jax.engine.follower import Follower
from mtp_jax.engine.guided import Grammars
from mtp_jax.engine.leader import Leader
from mtp_jax.engine.memory import MemoryPlan, check_memory, device_memory_bytes, plan_memory
from mtp_jax.engine.options import EngineOptions, resolve_config
from mtp_jax.engine.placed import check_placed, load_weights
from mtp_jax.engine.plan_arrays import PlanWriter
from mtp_jax.engine.shaping_slots import ShapingSlots
from mtp_jax.engine.stand_ins import shapes_of
from mtp_jax.engine.state import init_state, state_shapes, state_specs
from mtp_jax.engine.step import Program, dividing_sizes
from mtp_jax.engine.weights import WeightLayout, with_float8
from mtp_jax.errors import InvalidValueError
from mtp_jax.loading import (
    MTPHead,
    PlacedDir,
    SafetensorsDir,
    WeightSource,
    default_model_path,
    find_mtp_head,
    open_mtp_head,
    resolve_model,
    resolve_mtp_head,
)
from mtp_jax.models.block import joint_kind
from mtp_jax.models.leaves import Read
from mtp_jax.models.registry import check_supported, layer_kinds, layer_sizes, mtp_prefix
from mtp_jax.progress import Report
from mtp_jax.scheduler.scheduler import Scheduler
from sharding.hosts import check_everybody_takes_part
from sharding.mesh import abstract_mesh, make_mesh
from sharding.placement import Placement, make_placement
from sharding.stage_plan import StagePlan, plan_stages

log = logging.getLogger(__name__)

COMPILER_THREADS = 2  # at the start: one traces while the other waits for XLA


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """An engine that is decided and not built: what `--check` prints and `build_engine` builds."""

    options: EngineOptions
    source: WeightSource
    read_mtp: Read | None
    head: MTPHead | None  # where the MTP module does not come from the checkpoint
    program: Program
    buckets: BucketTable
    memory: MemoryPlan

    @property
    def config(self) -> EngineConfig:
        return self.program.config

    @property
    def model(self) -> ModelConfig:
        return self.program.layout.model

    @property
    def model_name(self) -> str:
        if self.options.served_model_name is not None:
            return self.options.served_model_name
        path = _model_path(self.options)
        return path.stem if path.suffix == ".gguf" else path.name

    def _whole_axes(self) -> list[str]:
        """A line on what is not split though the mesh would allow it, because it does not divide."""
        placement, sizes = self.program.layout.placement, dividing_sizes(self.model)
        names = [f"{name} ({sizes[name]})" for name in sizes if name in placement.replicated]
        return [f"replicated   {', '.join(names)}: not a multiple of the devices"] if names else []

    def describe(self) -> str:
        """Model, mesh and memory, a few lines for people."""
        config, mesh = self.config, self.program.layout.placement.mesh
        assert isinstance(mesh, Mesh)
        device = mesh.devices.flat[0]
        k = config.num_speculative_tokens
        speculation = f"K = {k}, {config.draft_sampling} drafts" if k else "off (K = 0)"
        if config.adaptive_drafts:
            speculation = f"K = 0 to {k} as measured, {config.draft_sampling} drafts"
        if k and self.head is not None:
            rows = self.head.draft_vocab
            among = "" if rows is None else f", which chooses among {rows} tokens"
            speculation += f"; MTP head {self.head.path}{among}"
        lines = [
            f"model        {self.source.describe()}",
            f"mesh         stage {config.stages} x data {config.data} x tensor {config.tensor} "
            f"on {mesh.devices.size} x {device.device_kind} ({jax.default_backend()}), {config.dtype}",
            f"stages       {self.program.layout.plan.describe()}",
            *self._whole_axes(),
            f"speculation  {speculation}",
            f"requests     {config.max_num_seqs} at a time, {config.max_model_len} tokens each at most",
            f"memory       {self.memory.describe()}",
        ]
        return "\n".join(lines)


def draw_blueprint(options: EngineOptions, source: WeightSource | None = None) -> Blueprint:
    """Decides everything about an engine, reading the checkpoint's headers and, where it looks for an MTP
    head, its final norm.

    `source` is an already open checkpoint to use instead of `options.model`.

    Raises:
      InvalidValueError: an option that cannot work, with the flag's name.
    """
    path = _model_path(options) if source is None else None
    source = source or resolve_model(options.model)
    source.tokenizer()  # a missing one should be known now, not after the weights are read
    if options.kv_cache_gib is not None and "num_pages" in options.overrides:
        raise InvalidValueError("--kv-cache-gib", options.kv_cache_gib, "not both this and --num-pages")
    model = source.config
    check_supported(model)
    head = _find_head(options, source, path)
    has_mtp = head is not None or model.num_nextn_predict_layers > 0
    on_cpu, memory = jax.default_backend() == "cpu", device_memory_bytes()
    there = Devices(jax.device_count(), jax.local_device_count())
    float8 = _float8(source, mtp_prefix(model) if head is not None else None)
    options = choose_layout(options, model, there, memory, float8, has_mtp=has_mtp, on_cpu=on_cpu)
    config = resolve_config(options, model, has_mtp=has_mtp, on_cpu=on_cpu)
    mesh = _checked("--stages", config.stages, lambda: make_mesh(config.stages, config.data, config.tensor))
    _checked("--stages", config.stages, lambda: check_everybody_takes_part(mesh))
    draft_vocab = head.draft_vocab if head is not None else None
    if isinstance(source, PlacedDir):
        draft_vocab = source.draft_vocab
    layout = draw_layout(model, config, mesh, draft_vocab)
    if isinstance(source, PlacedDir):
        layout = dataclasses.replace(layout, groups=source.float8)
        check_placed(source, layout)
    else:
        layout = with_float8(layout, float8)
    pages_given = "num_pages" in options.overrides
    memory = plan_memory(layout, config, options.kv_cache_gib, pages_given, memory)
    check_memory(memory, config, options.kv_cache_gib, pages_given)
    config = dataclasses.replace(config, num_pages=memory.num_pages)
    program = Program(config, layout)
    read_mtp = source.read if head is None else head.read
    return Blueprint(
        options, source, read_mtp if has_mtp else None, head, program, BucketTable.of(config), memory
    )


def _float8(source: WeightSource, others: str | None) -> dict[str, int]:
    """Columns that share a scale, of float8 tensors; names that begin with `others` are in another file."""
    blocks = source.blocks if isinstance(source, SafetensorsDir) else {}
    return {
        name: columns for name, columns in blocks.items() if others is None or not name.startswith(others)
    }


def choose_layout(
    options: EngineOptions,
    model: ModelConfig,
    devices: Devices,
    available: int | None,
    float8: Mapping[str, int],
    *,
    has_mtp: bool,
    on_cpu: bool,
) -> EngineOptions:
    """The options with a number for each axis of the mesh that is `auto`; see `fill_layout`.

    Args:
      available: bytes of a device; None: unknown, and then every layout fits.
      float8: see `with_float8`.

    Raises:
      NothingFitsError: no layout of these devices holds the model.
    """
    if not wants_layout(options.overrides):
        return options

    def judge(layout: Mapping[str, int]) -> Merit | None:
        tried = dataclasses.replace(options, overrides={**options.overrides, **layout})
        try:
            config = resolve_config(tried, model, has_mtp=has_mtp, on_cpu=on_cpu)
            mesh = abstract_mesh(config.stages, config.data, config.tensor)
            drawn = with_float8(draw_layout(model, config, mesh), float8)
            pages_given = "num_pages" in options.overrides
            memory = plan_memory(drawn, config, options.kv_cache_gib, pages_given, available)
            check_memory(memory, config, options.kv_cache_gib, pages_given)
        except InvalidValueError:
            return None
        room = config.data * (memory.num_pages // config.pages_per_slot)
        return Merit(max(0, config.max_num_seqs - room), len(drawn.placement.replicated))

    layout = fill_layout(options.overrides, devices, model.num_hidden_layers, judge)
    return dataclasses.replace(options, overrides={**options.overrides, **layout})


def draw_layout(
    model: ModelConfig, config: EngineConfig, mesh: Mesh | AbstractMesh, draft_vocab: int | None = None
) -> WeightLayout:
    """Which layers each stage runs, and where every weight lies. Needs no device where the mesh is abstract.

    Args:
      model: the target's configuration.
      config: the engine's.
      mesh: of the sizes that `config` says.
      draft_vocab: ids that drafts are chosen from, where the MTP head has a list of them.

    Raises:
      InvalidValueError: stages that the model's layers cannot be cut into, or experts that do not divide.
    """

    def cut(counts: tuple[int, ...] | None) -> StagePlan:
        return plan_stages(config.stages, layer_kinds(model), layer_sizes(model), counts, joint_kind)

    plan = _checked("--stages", config.stages, lambda: cut(None))
    if config.stage_layers is not None:
        got = ",".join(map(str, config.stage_layers))
        plan = _checked("--stage-layers", got, lambda: cut(config.stage_layers))
    with_mtp = config.num_speculative_tokens > 0
    placement, dtype = _place(model, config, mesh), jnp.dtype(config.dtype)
    return WeightLayout(model, plan, placement, dtype, with_mtp, draft_vocab if with_mtp else None)


def _place(model: ModelConfig, config: EngineConfig, mesh: Mesh | AbstractMesh) -> Placement:
    """The placement table on this mesh, for this model."""
    shared = config.experts_over == "data-tensor" and config.data > 1
    if shared and model.experts is None:
        raise InvalidValueError("--experts-over", config.experts_over, "tensor: this model has no experts")
    placement = make_placement(mesh, dividing_sizes(model), frozenset({"experts"} if shared else ()))
    if placement.shared & placement.replicated and model.experts is not None:
        devices = config.data * config.tensor
        legal = f"tensor: {devices} devices of a stage do not divide {model.experts.num_experts} experts"
        raise InvalidValueError("--experts-over", config.experts_over, legal)
    return placement


def build_engine(options: EngineOptions, report: Report = lambda phase, done, total: None) -> Engine:
    """Reads, places and compiles. `report(phase, done, total)` for phases reading, placing and compiling."""
    return construct(draw_blueprint(options), report)


def construct(
    blueprint: Blueprint,
    report: Report = lambda phase, done, total: None,
    hosts: Leader | Follower | None = None,
) -> Engine:
    """Builds the engine of a blueprint: compiles while it reads, for a program needs only shapes.

    On several hosts every process builds its own, of a blueprint that they `agree` on, and `hosts` are the
    others. Process 0 says what is compiled; its engine is ready when all are.
    """
    config, program, layout = blueprint.config, blueprint.program, blueprint.program.layout
    shapes, specs = state_shapes(layout, config), state_specs(layout, config)
    background, table = blueprint.options.background_compile, blueprint.buckets
    leader = hosts if isinstance(hosts, Leader) else None
    executables = Executables(
        program,
        shapes_of(program, shapes, specs),
        background=background and not isinstance(hosts, Follower),
        announce=None if leader is None else leader.announce,
    )
    with concurrent.futures.ThreadPoolExecutor(COMPILER_THREADS, "mtp-jax-compile") as pool:
        first, fallback = table.first(), table.fallback()
        if not background:  # nothing may be compiled later than it is wanted
            first, fallback = [*first, *fallback], []
        if isinstance(hosts, Follower):
            hosts.compile_with(executables.compile)
            first, fallback = [], []
        compiles = [pool.submit(executables.compile, bucket) for bucket in first]
        try:
            weights = load_weights(
                blueprint.source,
                layout,
                blueprint.read_mtp,
                lambda done, total: report("reading", done, total),
                blueprint.head,
            )
            report("placing", 0, 1)
            state = init_state(shapes, specs, layout.placement)
            jax.block_until_ready((weights, state))
            if hosts is not None:
                hosts.wait_ready()
            report("placing", 1, 1)
            for done, compiled in enumerate(concurrent.futures.as_completed(compiles)):
                report("compiling", done, len(compiles))
                compiled.result()
            report("compiling", len(compiles), len(compiles))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    executables.expect(fallback)
    scheduler = Scheduler(
        config,
        eos_token_ids=layout.model.eos_token_ids,
        row_buckets=table.rows,
        width_buckets=table.widths,
        chunk_buckets=table.chunks,
    )
    tokenizer = blueprint.source.tokenizer()
    return Engine(
        model_name=blueprint.model_name,
        model_config=layout.model,
        config=config,
        tokenizer=tokenizer,
        scheduler=scheduler,
        executables=executables,
        buckets=table,
        writer=PlanWriter(config, layout.placement),
        shaping=ShapingSlots(config.max_num_seqs, layout.padded_vocab, layout.placement),
        grammars=Grammars(
            tokenizer,
            layout.model.vocab_size,
            layout.model.eos_token_ids,
            layout.padded_vocab,
            config.max_num_seqs,
            layout.placement,
        ),
        weights=weights,
        state=state,
        leader=leader,
    )


def _model_path(options: EngineOptions) -> Path:
    # Not resolved: a link's name is the model's, and what lies beside the link belongs to it.
    path = default_model_path() if options.model is None else Path(options.model).expanduser()
    return Path(os.path.abspath(path))


def _find_head(options: EngineOptions, source: WeightSource, path: Path | None) -> MTPHead | None:
    """The MTP module to use instead of the checkpoint's own: --mtp-head, or one that goes with the model."""
    if isinstance(source, PlacedDir):
        if options.mtp_head is not None:
            raise InvalidValueError("--mtp-head", options.mtp_head, "none: placed arrays have their own head")
        return None
    if options.mtp_head is not None:
        head = open_mtp_head(resolve_mtp_head(options.mtp_head), source.config)
        if not head.fits(source):
            log.warning("%s was trained for another model: its drafts may seldom be accepted", head.path)
        return head
    if source.config.num_nextn_predict_layers or options.overrides.get("num_speculative_tokens") == 0:
        return None
    return find_mtp_head(path, source)


def _checked[T](flag: str, got: object, make: Callable[[], T]) -> T:
    """Sharding knows nothing of this package's errors: its ValueErrors say what is legal, not the flag."""
    try:
        return make()
    except ValueError as error:
        raise InvalidValueError(flag, got, str(error)) from error
