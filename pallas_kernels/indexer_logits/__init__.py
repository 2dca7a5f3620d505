"""Scores of a sparse attention's indexer over paged keys."""

from pallas_kernels.device import NotHereError as NotHereError
from pallas_kernels.indexer_logits.api import indexer_logits as indexer_logits
