"""Cases of a measurement as words: rows of a decode step and tokens in the cache of each."""

from __future__ import annotations

import argparse
import re


def parse_cases(text: str) -> list[tuple[int, int]]:
    """[(rows, context)] of "1x1024,8x32000". Raises ArgumentTypeError naming what is no case."""
    cases = []
    for word in text.split(","):
        if not (found := re.fullmatch(r"([1-9]\d?)x(\d+)", word.strip())) or int(found[1]) > 16 or int(found[2]) < 2:
            raise argparse.ArgumentTypeError(f"{word!r} is not ROWSxCONTEXT with 1 to 16 rows and a context of 2 or more")
        cases.append((int(found[1]), int(found[2])))
    return cases
