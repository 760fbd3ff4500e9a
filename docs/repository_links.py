"""Markdown extension of the site: links to files outside docs/ lead to the repository, or to this clone."""

import os
import re
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

REPOSITORY = os.environ.get("REPOSITORY", Path(__file__).parents[1].as_uri())  # in CI https://github.com/…/blob/main


class Links(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines).replace("](docs/", "](")  # of the README, which is the first page
        return re.sub(r"\]\((\.\./)*(?=(src|examples|CITATION)\b)", f"]({REPOSITORY}/", text).split("\n")


class RepositoryLinks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(Links(md), "repository_links", 31)  # after snippets


def makeExtension(**options: object) -> RepositoryLinks:  # noqa: N802
    return RepositoryLinks(**options)
