"""What a release needs outside of the package: links for an index, workflows, and the citation."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import deepspeed_compress
from deepspeed_compress.cli import COMMANDS

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
REPOSITORY = "https://forge.example/owner/name"
LINK = re.compile(r"""(?:\]\(|src=")([^)\s"]+)""")


@pytest.fixture(scope="module")
def release_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_links", GITHUB / "release_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_of_a_release_links_to_files_of_its_commit(release_links: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = LINK.findall(release_links.with_absolute_links(readme, REPOSITORY, "abc"))
    assert len(links) == len(LINK.findall(readme))
    kinds = {"png": "raw", "svg": "raw"}
    for link in links:
        kind, commit, file = link.removeprefix(f"{REPOSITORY}/").split("/", 2)
        file = file.partition("#")[0]
        assert (kind, commit) == (kinds.get(file.rpartition(".")[2], "blob"), "abc")
        assert (ROOT / file).is_file()


def test_other_links_of_a_readme_stay(release_links: ModuleType) -> None:
    readme = "[a](https://example.org/a.png) [b](#install)"
    assert release_links.with_absolute_links(readme, REPOSITORY, "abc") == readme


def test_the_metadata_of_a_release_names_the_repository(release_links: ModuleType) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, after = (tomllib.loads(text) for text in (project, release_links.with_urls(project, REPOSITORY, "abc")))
    urls = after["project"].pop("urls")
    assert before == after
    assert urls["Repository"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in urls.values())


def workflow(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return loaded


def test_workflows_may_write_only_what_they_publish() -> None:
    writes = set()
    for file in WORKFLOWS:
        content = workflow(file)
        assert "permissions" in content, "without it, a workflow has the permissions of the repository's settings"
        rights = {
            "": content["permissions"],
            **{name: job.get("permissions", {}) for name, job in content["jobs"].items()},
        }
        writes |= {
            (file.stem, job, right)
            for job, given in rights.items()
            for right, level in given.items()
            if level != "read"
        }
    assert writes == {("docs", "site", "contents"), ("release", "publish", "id-token")}


def test_actions_are_pinned_to_a_major_version() -> None:
    actions = [
        step["uses"]
        for file in WORKFLOWS
        for job in workflow(file)["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert len(actions) > 5
    assert [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action)] == []


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((GITHUB / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == deepspeed_compress.__version__
    assert citation["license"] == project["license"]


def test_a_bug_report_asks_for_the_output_of_existing_commands() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE/bug_report.yml").read_text(encoding="utf-8")
    names = set(re.findall(r"ds-compress ([a-z]+)", text))
    assert {"check", "doctor"} <= names <= {command.name for command in COMMANDS}
