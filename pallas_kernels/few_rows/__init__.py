"""The products of a decoder layer on a few rows, each one kernel with what stands around it."""

from pallas_kernels.device import NotHereError as NotHereError
from pallas_kernels.few_rows.api import norm_qkv_rope as norm_qkv_rope
from pallas_kernels.few_rows.api import norm_swiglu as norm_swiglu
from pallas_kernels.few_rows.api import project_add as project_add
