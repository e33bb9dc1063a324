"""Files beside the code: one version everywhere, workflows and forms that GitHub accepts, commands that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_parallel
from hf_parallel.kernels import native

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def name_of(path: Path) -> str:
    return path.stem


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


# Version and citation


def test_the_version_is_the_same_everywhere() -> None:
    bib = (ROOT / "CITATION.bib").read_text()
    assert read(ROOT / "CITATION.cff")["version"] == hf_parallel.__version__
    assert re.findall(r"^ *version *= *\{(.*)\}", bib, re.MULTILINE) == [hf_parallel.__version__]
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_both_citations_have_the_papers_of_the_modes() -> None:
    cff = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(cff)
    cited = {
        one["identifiers"][0]["value"].removeprefix("arXiv:"): [
            f"{author['given-names']} {author['family-names']}" for author in one["authors"]
        ]
        for one in cff["references"]
    }
    entries = (ROOT / "CITATION.bib").read_text().replace(r"{\'e}", "é").split("@misc")[1:]
    fields = [dict(re.findall(r"^ *(\w+) *= *\{(.*?)\},?$", entry, re.MULTILINE)) for entry in entries]
    assert {one["eprint"]: one["author"].split(" and ") for one in fields} == cited
    pages = (ROOT / "README.md").read_text()
    assert all(f"https://arxiv.org/abs/{number}" in pages for number in cited)


# Workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_has_few_rights_and_steps_that_exist(path: Path) -> None:
    workflow = read(path)
    assert {"name", True, "permissions", "jobs"} <= set(workflow)  # YAML 1.1 reads `on` as True
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"])
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        assert re.search(r"^[\w./-]+@(v\d+|release/v\d+)$", step.get("uses", "a@v1")), step
        command = step.get("run", "")
        for target in re.findall(r"\bmake (\w[\w-]*)", command):
            assert target in make_targets(), step
        for script in re.findall(r"(?:^| )(\.ci/\w+)", command):
            assert (ROOT / script).stat().st_mode & 0o111, step


def test_expressions_of_workflows_name_what_a_job_has() -> None:
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            known = {key for key in matrix if key != "include"}
            known |= {key for combination in matrix.get("include", []) for key in combination}
            assert set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job))) <= known, path


def test_packages_are_published_by_identity_with_attestations_after_all_checks() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == set(jobs) - {"publish"}
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert publish["environment"] == "pypi"
    upload = publish["steps"][-1]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert upload["with"] == {"packages-dir": "dist", "attestations": True}
    assert jobs["wheel"]["env"] == {"HF_PARALLEL_WHEEL": "native"}


def test_the_lowest_transformers_of_the_matrix_is_that_of_the_package() -> None:
    lowest = re.search(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    torch = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    assert torch is not None
    combinations = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["versions"]["strategy"]["matrix"][
        "include"
    ]
    assert combinations[0] == {"python": "3.10", "torch": torch[1], "transformers": lowest[1]}


# Forms for issues


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_has_what_github_requires(path: Path) -> None:
    form = read(path)
    assert set(form) <= {"name", "description", "labels", "body"}
    assert all(isinstance(form[key], str) and form[key] for key in ("name", "description"))
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for part in form["body"]:
        assert part["type"] in ("markdown", "input", "textarea", "checkboxes"), part
        assert set(part) <= {"type", "id", "attributes", "validations"}
        attributes = part["attributes"]
        assert attributes["value" if part["type"] == "markdown" else "label"]
        if part["type"] == "checkboxes":
            assert all(isinstance(option["label"], str) for option in attributes["options"])
    for link in re.findall(r"\.\./blob/HEAD/([\w./]+)", path.read_text()):
        assert (ROOT / link).is_file(), link
    for choice in re.findall(rf"{native.NATIVE_VARIABLE}=(\w+)", path.read_text()):
        assert choice in native.NATIVE_CHOICES


# Pages of the repository


@pytest.mark.parametrize("name", ["AGENTS.md", "SECURITY.md", "CONTRIBUTING.md", "README.md"])
def test_paths_and_commands_of_a_page_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:hf_parallel|docs|tests|\.github)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([\w./]+)(?:#[\w-]*)?\)", text):
        assert (ROOT / link).exists(), link
    for target in re.findall(r"^    make ([\w-]+)", text, re.MULTILINE):
        assert target in make_targets(), target


def test_the_page_for_agents_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40


def test_no_text_installs_the_package_by_its_name() -> None:
    """Until the name is published, anyone may register it: texts name the wheel, a clone, or other packages."""
    folders = ("hf_parallel", "docs", "examples", "tests", "kernel_hub", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    for path in files:
        if path.suffix in (".py", ".md", ".txt", ".html", ".ipynb", ".yml", ".toml", ""):
            text = path.read_text(errors="replace")
            found = re.search(r"\bpip install (?:-\S+ )*['\"]?hf[_-]parallel\b(?!-\*|-\d)", text)
            assert found is None, (path, found)
