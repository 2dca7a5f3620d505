"""Decode attention over paged KV."""

from pallas_kernels.device import NotHereError as NotHereError
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
