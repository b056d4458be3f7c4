"""The visible words and the elements of an HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class PageText(HTMLParser):
    """The visible words of a page, and its elements."""

    def __init__(self, page):
        super().__init__()
        self.words, self.names, self.attributes = [], [], []
        self._styling = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        self._styling = tag == "style"

    def handle_data(self, data):
        if not self._styling:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))
