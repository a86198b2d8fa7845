"""A hook of mkdocs: links of a page that lead out of docs lead to the forge on the site, where those files are not."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """The text of a page with such links made absolute."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        if target.startswith("docs/"):
            return match[0]
        return f"]({config.repo_url.rstrip('/')}/blob/main/{target}"

    return LINK.sub(outside, markdown)
