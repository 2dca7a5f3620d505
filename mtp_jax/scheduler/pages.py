"""KV pages: who holds them, and which of them the prefix cache can answer again."""

import collections
from collections.abc import Sequence

ROOT = 0  # parent of the first page of every prompt


class PagePool:
    """Reference-counted pages with a prefix cache on top.

    A page is *free*, *held* by one or more requests, or *idle*: held by nobody, but its content is
    registered and a later prompt may match it. Idle pages are handed out again, least recently used
    first, once no free page is left.

    A registered page is known by (serial of its parent, its tokens, the next token). The next token
    belongs to the key because the MTP layer's last row in a page depends on it. Serials are never
    reused, so a key cannot come to mean another text after its parent was evicted, and keys are
    compared whole: a hash collision cannot matter.
    """

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool):
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._page_of_key: dict[tuple[int, tuple[int, ...], int], int] = {}
        self._key_of_page: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._serial_of_page: dict[int, int] = {}
        self._last_serial = ROOT

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of `pages` are idle, that is, would stop being available once shared."""
        return sum(page in self._idle for page in pages)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def is_registered(self, page: int) -> bool:
        return page in self._key_of_page

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages for one holder, evicting idle ones where needed."""
        assert count <= self.num_available, f"{count} pages asked of {self.num_available}"
        pages = []
        for _ in range(count):
            if not self._free:
                self._evict()
            page = self._free.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to registered pages."""
        for page in pages:
            assert page in self._key_of_page, f"page {page} is private"
            self._idle.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from `pages`, given in position order.

        The last page goes first, so that idle pages are evicted children before parents: a page
        without its parent can never be matched.
        """
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} released twice"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of_page:
                self._idle[page] = None
            else:
                self._free.append(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Registered pages that hold a prefix of `tokens`, in position order.

        At least one token is left over: a request must compute something to be sampled from, and the
        key of a page needs the token after it.
        """
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        parent, size = ROOT, self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = (parent, tuple(tokens[start : start + size]), tokens[start + size])
            page = self._page_of_key.get(key)
            if page is None:
                break
            pages.append(page)
            parent = self._serial_of_page[page]
        return pages

    def serial(self, page: int) -> int:
        """Name of a registered page as a parent."""
        return self._serial_of_page[page]

    def register(self, parent: int, tokens: tuple[int, ...], next_token: int, page: int) -> int:
        """Offers a held page, whose every position is computed, to later prompts.

        Args:
          parent: serial of the page before it; ROOT for the first.
          tokens: the `page_size` tokens in it.
          next_token: the token after them.

        Returns:
          The serial under which the content is known. Where another page already has this content
          it keeps the entry, and `page` stays private.
        """
        assert len(tokens) == self.page_size and self._holders[page] > 0 and page not in self._key_of_page
        key = (parent, tokens, next_token)
        known = self._page_of_key.get(key)
        if known is not None:
            return self._serial_of_page[known]
        self._last_serial += 1
        self._page_of_key[key] = page
        self._key_of_page[page] = key
        self._serial_of_page[page] = self._last_serial
        return self._last_serial

    def _evict(self) -> None:
        """Forgets the least recently used idle page and frees it."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of_key[self._key_of_page.pop(page)]
        del self._serial_of_page[page]
        self._free.append(page)
