"""An interpreter that ends with an engine in it."""

import subprocess
import sys
import textwrap

PROGRAM = """
    from mtp_jax.engine.build import construct, draw_blueprint
    from mtp_jax.engine.options import EngineOptions
    from mtp_jax.request import EngineRequest, SamplingParams
    from tests.parity.rig import TINY, RandomSource

    overrides = {"max_model_len": 96, "page_size": 4, "num_pages": 64, "num_speculative_tokens": 1}
    engine = construct(draw_blueprint(EngineOptions(overrides=overrides), RandomSource(TINY)))
    engine.add_request(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=9)))
    engine.step()
    while not engine.executables.is_compiling:
        pass
"""


def test_an_engine_that_nobody_closed() -> None:
    """The background compiler is at work when the program ends: that is no crash, and soon over."""
    program = textwrap.dedent(PROGRAM)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
