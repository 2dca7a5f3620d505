"""Compiles kernels at their named shapes for a TPU that is not there: a JSON line a kernel, on stdout.

    python tests/pallas_kernels/compile_for_tpu.py OP v6e              (of OPS and CHIPS; needs jax[tpu])
    python tests/pallas_kernels/compile_for_tpu.py OP v6e --bundles

The second reads, for a few shapes, the compiler's own dumps: bundles (instruction words, a cycle each but for
waiting), spilled vector registers, and what of VMEM a kernel holds. Dumps take ten times the compiler's time.
"""

import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}

BUNDLES = "--bundles" in sys.argv
DUMP = tempfile.TemporaryDirectory(prefix="tpu-dump-")
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",  # this and the next two keep libtpu from looking for a machine
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
if BUNDLES:
    flags = ("dump_llo_text", "emit_annotations")
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP.name} " + " ".join(
        f"--xla_jf_{flag}=true" for flag in flags
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from pallas_kernels.sparse_mla import packed, sparse_mla  # noqa: E402
from pallas_kernels.sparse_mla import shapes as latent_shapes  # noqa: E402

Spec = Callable[..., jax.ShapeDtypeStruct]


def compile_one(op: str, name: str, run: Callable[..., object], *specs: object) -> None:
    start = time.monotonic()
    memory = jax.jit(run).lower(*specs).compile().memory_analysis()
    found = {"seconds": round(time.monotonic() - start, 1), "temp": memory.temp_size_in_bytes}
    print(json.dumps({"kernel": f"{op} {name}"} | (read_dump(op) if BUNDLES else {}) | found), flush=True)


def read_dump(op: str) -> dict[str, int]:
    """Figures of the kernel named `op` that was compiled last; the dump is emptied."""
    folder = Path(DUMP.name)
    (program,) = folder.glob(f"*-{op}*-post-delay-converter.txt")
    (analysis,) = folder.glob(f"*-{op}*-schedule-analysis_final_bundles.txt")
    (use,) = folder.glob(f"*-{op}*-final_hlo-static-per-bundle-utilization.txt")
    held = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", program.read_text())
    (bundles,) = re.findall(r"total scheduled bundles:\s+(\d+)", analysis.read_text())
    header, *rows = (line.replace(",", "").split() for line in use.read_text().splitlines()[1:])
    spills = header.index("VSTORE:SPILL")
    counts = [int(row[spills]) for row in rows[2:] if len(row) == len(header)]
    for file in folder.iterdir():
        file.unlink()
    return {"bundles": int(bundles), "spilled": sum(counts), "vmem": sum(int(size, 16) for size in held)}


def run_sparse_mla(spec: Spec) -> None:
    words = packed.num_words(latent_shapes.ROW)
    for name, load in latent_shapes.LOADS.items():
        if BUNDLES and load.tokens != 16:
            continue  # more tokens are the same program, run more often
        compile_one(
            "sparse_mla",
            name,
            functools.partial(sparse_mla, scale=latent_shapes.SCALE, implementation="mosaic_tpu"),
            spec(load.tokens, load.heads, latent_shapes.ROW),
            spec(1024, 64, words, dtype=jnp.int32),
            spec(load.tokens, load.chosen, dtype=jnp.int32),
        )


OPS = {"sparse_mla": run_sparse_mla}


def main(op: str, chip: str) -> None:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
    device = SingleDeviceSharding(topology.devices[0])

    def spec(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    OPS[op](spec)


if __name__ == "__main__":
    main(*sys.argv[1:3])
