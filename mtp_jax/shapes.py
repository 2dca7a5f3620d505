"""Shape letters. The same letters stand in einsums, comments and docstrings everywhere.

B  rows of a group (one request slot each)   T  query tokens a row (K + 1 in the ring)
S  cache positions                           D  model width
N  query heads                               G  KV heads
Q  query heads a KV head, N / G              H  head width
F  ffn width                                 V  vocabulary
K  drafts a round                            L  layers
Z  stages                                    C  tokens of a prefill chunk
M  flattened token rows, B * T + C           W  pages of a page table
P  KV pages                                  R  rounds a dispatch (latent rank in MLA)
E  experts                                   U  request slots
"""
