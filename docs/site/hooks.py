"""Pages of the site that are not files in docs/.

The README is the home page, the changelog and the configurations come from the root of the repository, and the
references of lint rules and configuration keys are generated from the code.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from deepspeed_compress.tools.lint.command import page as rule_page
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.schema import key_page

ROOT = Path(__file__).parents[2]
HOME = "index.md"
ELSEWHERE = ("CHANGELOG.md", "LICENSE", "configs")
_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(?:deepspeed_compress|launch|tests)/[^)]*\)")
_LINK = re.compile(r"""(\]\(|src=")(?!https?:|#)([^)\s#"]+)""")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files from elsewhere under their path in the repository, README.md as the home page, and generated pages."""
    places = [ROOT / name for name in ELSEWHERE]
    found = [file for place in places for file in (sorted(place.rglob("*.*")) if place.is_dir() else [place])]
    for file in found:
        files.append(File.generated(config, file.relative_to(ROOT).as_posix(), abs_src_path=str(file)))
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def generated_pages() -> dict[str, str]:
    """Return the text of each generated page by its path in docs/."""
    return {"keys.md": key_page(), "rules.md": rule_page(RULES)}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site, which has no sources."""
    place = page.file.src_uri
    return _LINK.sub(lambda link: f"{link[1]}{_relative(link[2], place)}", _SOURCE.sub(r"\1", markdown))


def _relative(link: str, place: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(place)), link))
    return posixpath.relpath(_on_site(target), posixpath.dirname(place) or ".")


def _in_repository(place: str) -> str:
    if place == HOME:
        return "README.md"
    return place if place.startswith(ELSEWHERE) else f"docs/{place}"


def _on_site(file: str) -> str:
    return HOME if file == "README.md" else file.removeprefix("docs/")
