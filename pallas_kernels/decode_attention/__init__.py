"""Decode attention over paged KV that writes its own tokens."""

from pallas_kernels.decode_attention.api import decode_attention as decode_attention
from pallas_kernels.device import NotHereError as NotHereError
