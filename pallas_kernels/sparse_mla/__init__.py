"""Attention over chosen rows of a latent cache."""

from pallas_kernels.device import NotHereError as NotHereError
from pallas_kernels.sparse_mla.api import rows_of as rows_of
from pallas_kernels.sparse_mla.api import sparse_mla as sparse_mla
from pallas_kernels.sparse_mla.packed import pack_rows as pack_rows
