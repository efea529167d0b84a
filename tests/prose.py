"""Sentences of pages that are too long: ``python tests/prose.py docs/*/*.md`` lists them.

Code, tables and comments are no prose. A piece of code in a sentence counts as a word. A sentence also ends
at a list item, and before a list or a block of code.
"""

import re
import sys
from pathlib import Path

MOST = 25  # words
_NO_PROSE = re.compile(r"^(`{3,}|:{3,}).*?^\1|<!--.*?-->|^---\n.*?^---\n", re.M | re.S)
_BREAK = re.compile(r"\n\s*\n|^#.*$|^ *\|.*$|^ *[*-] |^ *\d+\. |^ {4}.*$", re.M)
_END = re.compile(r"""(?<=[.!?])[*)"”]*\s+(?=[A-Z`*\[("\d])""")


def sentences(text):
    """Each sentence of a page in Markdown, with ``c`` for code."""
    for block in _BREAK.split(_NO_PROSE.sub("\n\n", text)):
        words = " ".join((block or "").split())
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`c`", words))
        yield from filter(None, _END.split(words))


def too_long(text):
    return [one for one in sentences(text) if len(one.split()) > MOST]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = too_long(Path(name).read_text())
        print(f"{name}: {len(found)}", *(f"{len(x.split())} {x}" for x in found), sep="\n  ")
