"""Point the README and the metadata at the repository and the commit from which a release is built.

A package index shows the README without the files that it links to. Run it in the root of a checkout, whose README.md
and pyproject.toml it changes::

    python .github/release_links.py REPOSITORY_URL COMMIT
"""

import re
import sys
from pathlib import Path

_RELATIVE_LINK = re.compile(r"""(\]\(|src=")(?!https?:|#)([^)\s"]+)""")
_PICTURES = (".png", ".svg")


def main(arguments: list[str]) -> None:
    repository, commit = arguments
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(with_absolute_links(readme.read_text(encoding="utf-8"), repository, commit), encoding="utf-8")
    project.write_text(with_urls(project.read_text(encoding="utf-8"), repository, commit), encoding="utf-8")


def with_absolute_links(readme: str, repository: str, commit: str) -> str:
    """Return `readme` with links to pages of `repository` at `commit`, and to the contents of pictures."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith(_PICTURES) else "blob"
        return f"{link[1]}{repository}/{kind}/{commit}/{link[2]}"

    return _RELATIVE_LINK.sub(absolute, readme)


def with_urls(project: str, repository: str, commit: str) -> str:
    """Return the text of pyproject.toml, `project`, with the addresses that an index shows."""
    urls = {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Documentation": f"{repository}/blob/{commit}/docs/start.md",
        "Changelog": f"{repository}/blob/{commit}/CHANGELOG.md",
    }
    return "\n".join([project, "[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items()), ""])


if __name__ == "__main__":
    main(sys.argv[1:])
