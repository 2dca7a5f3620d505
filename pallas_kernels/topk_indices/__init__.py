"""The positions of the best scores of each row."""

from pallas_kernels.device import NotHereError as NotHereError
from pallas_kernels.topk_indices.api import topk_indices as topk_indices
