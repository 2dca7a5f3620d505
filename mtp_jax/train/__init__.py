"""Training MTP heads: text that the target writes, the loss over unrolled draft steps, and the export."""
