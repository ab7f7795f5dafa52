"""What engines agree on, without a socket, a thread, a clock or a file: the format of stored pages.

Chain         the keys of a prompt's pages
parts_of      what a worker writes of each page, and :class:`StoredPart`, which describes it
PageHeader    what the file of a part says of itself
PageReads     which pages a worker reads for a prefix, and by which plans
"""

from kvplan.protocol.page_keys import PAGE_TOKENS, Chain, Fact
from kvplan.protocol.page_parts import StoredPart, parts_of
from kvplan.protocol.pages import PageHeader
from kvplan.protocol.prefix_search import Attended

__all__ = [
    "PAGE_TOKENS",
    "Attended",
    "Chain",
    "Fact",
    "PageHeader",
    "StoredPart",
    "parts_of",
]
