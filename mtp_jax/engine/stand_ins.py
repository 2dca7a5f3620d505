"""What the engine compiles its steps for: shapes and placements of their arguments, without the arrays."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mtp_jax.config import EngineConfig
from mtp_jax.engine.buckets import Bucket, Sampling
from mtp_jax.engine.guided import mask_shape
from mtp_jax.engine.plan_arrays import PLAN_SPEC, PlanArrays, PlanWriter
from mtp_jax.engine.shaping_state import shaping_shapes, shaping_specs
from mtp_jax.engine.state import EngineState, with_shaping
from mtp_jax.engine.step import Program
from mtp_jax.engine.trees import spec_of, stand_in
from mtp_jax.engine.weights import Weights
from mtp_jax.scheduler.plan import DispatchPlan, SlotView


def shapes_of(
    program: Program, shapes: EngineState, specs: EngineState
) -> Callable[[Bucket], tuple[Weights, EngineState, PlanArrays]]:
    """Shapes and placements to compile for: exactly those of the arrays that the step will get."""
    layout = program.layout

    def placed(shape: jax.Array, spec: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(layout.placement.mesh, spec_of(spec))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    weights = jax.tree.map(placed, layout.shapes(), layout.specs())
    state = jax.tree.map(placed, shapes, specs)
    shaping = jax.tree.map(
        placed,
        shaping_shapes(program.config.max_num_seqs, layout.padded_vocab),
        shaping_specs(layout.placement),
    )

    def of_bucket(bucket: Bucket) -> tuple[Weights, EngineState, PlanArrays]:
        idle = idle_plan(bucket, program.config)
        plan = PlanWriter(program.config, layout.placement).write(idle, bucket)
        plan = jax.tree.map(lambda x: placed(x, stand_in(PLAN_SPEC)), plan)
        if bucket.sampling is not Sampling.SHAPED:
            return weights, state, plan
        shape = mask_shape(program.config.max_num_seqs, bucket.drafts, layout.padded_vocab)
        masks = placed(stand_in(jax.ShapeDtypeStruct(shape, jnp.uint32)), stand_in(PLAN_SPEC))
        return weights, with_shaping(state, shaping), dataclasses.replace(plan, masks=masks)

    return of_bucket


def idle_plan(bucket: Bucket, config: EngineConfig) -> DispatchPlan:
    """A plan in which nothing is live."""
    ticks = config.data * bucket.rounds * config.stages
    return DispatchPlan(
        index=0,
        rounds=bucket.rounds,
        rows=((-1,) * bucket.rows,) * (config.data * config.stages),
        slots=tuple(SlotView() for _ in range(config.max_num_seqs)),
        chunks=(None,) * ticks if bucket.chunk else (),
        num_rows=bucket.rows,
        width=bucket.width,
        chunk_size=bucket.chunk,
        has_lane=bucket.chunk > 0,
    )
