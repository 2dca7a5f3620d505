"""Text that repeats itself: how much, and from where on."""

from collections.abc import Sequence

import numpy as np

GRAM = 4  # tokens


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams among all 4-grams; 1 for a text too short to have one."""
    return pooled_distinct_share([tokens])


def pooled_distinct_share(texts: Sequence[Sequence[int]]) -> float:
    """Distinct 4-grams among those of all texts together; none reaches from one text into another."""
    grams = np.concatenate([_grams(text) for text in texts]) if texts else _grams(())
    return len(np.unique(grams, axis=0)) / len(grams) if len(grams) else 1.0


def loop_start(tokens: Sequence[int], least_share: float, most_excess: float) -> int:
    """Tokens before the text goes in circles; all of them where it does not.

    It does where fewer than `least_share` of its 4-grams are distinct, or where from some token on it has
    `most_excess` more than half of its 4-grams from what it said before. The loop begins where new 4-grams
    stop outnumbering repeated ones, so that what is kept has a share of at least one half.
    """
    grams = _grams(tokens)
    if not len(grams):
        return len(tokens)
    is_new = np.zeros(len(grams), bool)
    is_new[np.unique(grams, axis=0, return_index=True)[1]] = True
    surplus = np.cumsum(is_new - 0.5)
    peak = len(surplus) - 1 - int(np.argmax(surplus[::-1]))  # the last one of the highest
    if is_new.mean() >= least_share and surplus[peak] - surplus[-1] < most_excess:
        return len(tokens)
    return peak + GRAM


def _grams(tokens: Sequence[int]) -> np.ndarray:
    """[n - 3, 4]; no rows for fewer than 4 tokens."""
    ids = np.asarray(tokens, np.int64)
    if len(ids) < GRAM:
        return np.empty((0, GRAM), np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, GRAM)
