"""README and docs: code runs, commands and settings exist, figures and pictures are up to date."""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mode_table
import pytest
import yaml
from pages import (
    FALSE_WARNINGS,
    NEW_TOKENS,
    OWN_MODES,
    PAGES,
    READ_TOKENS,
    ROOT,
    WITH_CODE,
    blocks,
    garbled,
    name_of,
    run,
    small_scale,
    stand_in,
)

import hf_parallel
from hf_parallel.cli import main as cli
from hf_parallel.cli.evaluate import evaluate, read_runs
from hf_parallel.cli.generate import generate
from hf_parallel.cli.settings import read_settings
from hf_parallel.generation import MODES
from hf_parallel.generation.config import ModeTraits

DOCS = ROOT / "docs"
SHOWN = {
    "docs/index.md": r"(?m)^Alice: \w(.|\n)*^Bob: \w|^Bob: \w(.|\n)*^Alice: \w",
    "docs/modes/hogwild.md": r"Alice 1 ended at pass \d+ \| Alice: \w",
    "docs/modes/pdos.md": r"\[\['Mars', 'Venus', 'Jupiter'\]\] \d+ tokens in \d+ forward passes",
    "docs/modes/baselines.md": r"^\{'12': \d.*\} 12\n",
}
"""Pages whose examples show a text: a pattern of what they print."""
FROM_FOLDER = "docs/hub.md"
"""Loads the weights of the embedded model again."""
SEQUENTIAL = DOCS / "modes" / "pdos.md"
"""Shows an answer without a parallel part, about which `generate` warns."""
COMMANDS = ("accelerate", "hf-parallel", "make", "pip", "python")
UNCHECKED = ("cd", "curl", "git")
"""Other commands in shell blocks, whose arguments are not checked."""


def script(name: str) -> ModuleType:
    """Import a script of docs/, which may import others."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(DOCS)
        spec.loader.exec_module(module)
    return module


# Code


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=name_of(page),
            marks=[pytest.mark.filterwarnings(*FALSE_WARNINGS)] * (page != SEQUENTIAL)
            + [pytest.mark.slow] * (name_of(page) in SHOWN),
        )
        for page in WITH_CODE
    ],
)
def test_code_of_page_runs(
    page: Path,
    embedded: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = SHOWN.get(name_of(page))
    real = shown or name_of(page) == FROM_FOLDER
    with small_scale(embedded if real else stand_in(embedded), READ_TOKENS if shown else NEW_TOKENS):
        run(blocks(page, "python"), name_of(page))
    if shown:
        printed = capsys.readouterr().out
        assert not garbled(printed)
        assert re.search(shown, printed), printed


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page: in shell blocks, in blocks indented by four spaces, and in its text."""
    text = page.read_text().replace("\\\n", " ")  # continued lines
    text = re.sub(r"^<!-- (reference|status).*?^<!-- end of \1 -->$", "", text, flags=re.M | re.S)  # from elsewhere
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(rf"^    ((?:{'|'.join((*COMMANDS, *UNCHECKED))}) .*)$", text, re.MULTILINE)
    lines += re.findall(rf"`((?:{'|'.join(COMMANDS)}) [^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    own_modes = re.findall(r'mode: ClassVar\[str\] = "(\w+)"', text)  # a page may define a mode
    for line in lines:
        for command in line.split("&&"):
            words = [OWN_MODES[0] if word in own_modes else word for word in shlex.split(command, comments=True)]
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_page_exist(page: Path) -> None:
    for words in commands(page):
        assert words[0] in (*COMMANDS, *UNCHECKED), words
        if words[0] in COMMANDS:
            CHECKS[words[0]](words[1:])


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets, words


def check_pip(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for word in words[1:]:
        if word.endswith(".txt"):
            assert (ROOT / word).is_file(), words
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extra.split(",")), words


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] == "pip":
            return check_pip(words[2:])
        found = importlib.util.find_spec(".".join(words[1:3]) if words[1] == "benchmarks" else words[1])
        assert found is not None, words
        path = (
            Path(str(found.origin)).parent / "__main__.py"
            if found.submodule_search_locations
            else Path(str(found.origin))
        )
    else:
        path = ROOT / words[0]
    source = path.read_text() + (ROOT / "benchmarks" / "report.py").read_text()  # which has the common options
    if any("lm_eval" in word for word in words[:2]):
        return None  # lm-eval parses the arguments
    for option in (word.split("=")[0] for word in words if word.startswith("--") and word != "--help"):
        name = option[2:].replace("-", "_")  # an argument of `run_benchmark`
        assert f'"{option}"' in source or re.search(rf'\b{name}=|"{name}":', source), (words, path)
    return None


def check_hf_parallel(words: list[str]) -> None:
    words = words[: words.index(">")] if ">" in words else words
    options = cli.make_parser(words[0] if words else "").parse_args(words)
    if options.run is generate:
        read_settings(options)
    elif options.run is evaluate:
        read_runs(options)


def check_accelerate(words: list[str]) -> None:
    assert "hf_parallel" in words, words
    check_hf_parallel(words[words.index("hf_parallel") + 1 :])


CHECKS = {
    "accelerate": check_accelerate,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "hf-parallel": check_hf_parallel,
}


HELP = sorted((ROOT / "hf_parallel" / "cli").glob("*.txt"))
"""Texts that `--help` prints below the options."""


@pytest.mark.parametrize("path", HELP, ids=name_of)
def test_commands_of_help_text_exist(path: Path) -> None:
    text = re.sub(r" *\\\n +", " ", path.read_text())  # continued lines
    found = re.findall(rf"^ +((?:{'|'.join(COMMANDS)}) .*)$", text, re.MULTILINE)
    for line in found:
        words = shlex.split(re.split(r" {2,}", line)[0])  # a description follows
        CHECKS[words[0]](words[1:])


def test_arguments_of_lm_eval_name_the_model_as_a_server_does() -> None:
    """A server lists its model by the full id, and has the address of the completions."""
    shown = [text for page in PAGES for text in re.findall(r"--model_args (\S+)", page.read_text())]
    assert shown
    for arguments in shown:
        values = dict(pair.split("=", 1) for pair in arguments.split(","))
        assert "/" in values.get("model", values.get("pretrained", "")), arguments
        assert values.get("base_url", "/v1/completions").endswith("/v1/completions"), arguments


# Figures, pictures, links


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """Return the script that writes parts of the pages."""
    return script("generated")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_generated_parts_of_page_are_up_to_date(page: Path, generated: ModuleType) -> None:
    text = page.read_text()
    assert generated.text_of(text) == text, "run: make docs, or python docs/generated.py"
    assert not re.search(r"^(::: |```(figures|status))", text, re.MULTILINE), "GitHub shows these lines as they are"
    kinds = re.findall(r"^<!-- (figures|status|reference)\b", text, re.MULTILINE)
    assert kinds == re.findall(r"^<!-- end of (figures|status|reference) -->$", text, re.MULTILINE)


def test_tables_show_figures_with_units_and_leave_missing_ones_empty() -> None:
    columns = "way\nprefill = *.prefill_seconds, 0.0 s\nstep = *.step_seconds, 0 ms"
    shown = script("figures").table("2026-11-21-cpu-2-cores", "shared_prefix", columns, "one row = one_row\nbound")
    assert shown.splitlines()[2:] == ["| one row | 3.5 s |  |", "| bound |  | 74 ms |"]


@pytest.mark.parametrize("shown", ["86 ms", "(86 ms"])
def test_a_figure_in_running_text_equals_its_report(shown: str, generated: ModuleType) -> None:
    source = "<!-- 2026-11-21-cpu-2-cores shared_prefix.shared_prefix.step_seconds, 0 ms -->"
    assert generated.text_of(f"takes {shown}{source} each") == f"takes {shown}{source} each"
    with pytest.raises(ValueError, match="86 ms"):
        generated.text_of(f"takes 186 ms{source} each")
    with pytest.raises(ValueError, match="has ''"):
        generated.text_of(f"takes {shown}{source.replace('step_', 'stop_')} each")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("least of stages.attention.cases.[*]: flash.seconds / seconds, 0.0 times", "0.7 times"),
        ("most of stages.attention.cases.[bound=memory,kv_bytes>=268435456]: of_limit, 0%", "104%"),
        ("1 - acceptance.6.worst, 0%", "-39%"),
        ("acceptance.6.worst - 1, 0%", "39%"),
        ("sum of stages.attention.cases.[bound=neither]: seconds, 0 s", ""),
    ],
)
def test_figures_in_running_text_summarize_reports(path: str, value: str) -> None:
    assert script("figures").figure_in_text("2026-11-22-h200-attention", path) == value


CHECKED = (
    "agents_cache.md",
    "benchmarks.md",
    "block_attention.md",
    "cpu.md",
    "engine.md",
    "exactness.md",
    "grpo.md",
    "migration.md",
    "modes/hogwild.md",
    "modes/resample.md",
    "papers.md",
    "performance.md",
    "rl_on_trees.md",
    "serve.md",
    "your_model.md",
)
"""Pages all of whose figures are bound to a report, or say when they were measured."""
MEASURED = re.compile(r"[\d.,]*\d(?: (?:ms|us|s|seconds|MB|GB|times)\b|%)")
SOURCE = re.compile(r"20\d\d-\d\d-\d\d-|[A-Z][a-z]+ \d+,\s20\d\d|\bpapers?\b|\btarget|computed")
"""A report, a date, or a figure that was not measured here."""


@pytest.mark.parametrize("page", CHECKED)
def test_figures_in_running_text_say_where_they_come_from(page: str, generated: ModuleType) -> None:
    text = generated.IN_TEXT.sub("", generated.PART.sub("", (DOCS / page).read_text()))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    before = ""
    for paragraph in re.split(r"\n\n+", text):
        source = before + paragraph if paragraph.startswith("|") else paragraph  # a table has the source before it
        figures = MEASURED.findall(paragraph)
        assert not figures or SOURCE.search(source), (figures, paragraph)
        before = paragraph


def test_readme_is_short() -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # addresses of links
    assert len(re.findall(r"\S*\w\S*", text)) < 900


@pytest.mark.filterwarnings("ignore:the workers of hogwild have no rules")
def test_table_of_modes_says_what_each_mode_needs() -> None:
    written = mode_table.table_of(mode_table.PAGE.read_text(encoding="utf-8"))
    assert written == mode_table.table(), "run: python tests/helpers/mode_table.py"


def test_pictures_equal_what_their_script_draws() -> None:
    pictures = script("pictures")
    drawn = {f"{draw.__name__}.svg": draw().svg() for draw in pictures.PICTURES}
    assert {path.name: path.read_text() for path in pictures.FOLDER.iterdir()} == drawn


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_page_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """Return the addresses of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The site


@pytest.mark.slow
def test_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>", page.read_text())
        loaded += re.findall(
            r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload)[^>]*//[^>]*>", page.read_text()
        )
        assert not loaded, page
    settings = (site / "modes" / "hogwild.html").read_text()
    for field in hf_parallel.HogwildConfig.fields():
        assert f"<code>{field}</code>" in settings


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry if isinstance(entry, list) else entry.values()) for page in pages(part)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | {"docs_dir": str(DOCS)}
    named = pages(script("navigation").on_config(config)["nav"])
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_no_two_pages_have_the_same_name() -> None:
    titles = [page.read_text().partition("\n")[0] for page in DOCS.rglob("*.md")]
    assert all(title.startswith("# ") for title in titles)
    assert len(titles) == len(set(titles))


def test_every_public_name_is_in_the_reference() -> None:
    described = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"^<!-- reference ([\w.]+)", page.read_text(), re.M)
    }
    names = [name for name in hf_parallel.__all__ if not isinstance(getattr(hf_parallel, name), ModuleType)]
    assert {f"hf_parallel.{name}" for name in names} - described == set()


def test_members_in_the_reference_exist() -> None:
    for page in DOCS.rglob("*.md"):
        for name, members in re.findall(r"^<!-- reference ([\w.]+): (.*?) -->$", page.read_text(), re.MULTILINE):
            for member in members.split(", "):
                assert hasattr(pkgutil.resolve_name(name), member), f"{page.name}: {name}.{member}"


@pytest.mark.parametrize("mode", OWN_MODES)
def test_every_setting_is_described_by_its_dataclass(mode: str) -> None:
    described: set[str] = set()
    for cls in MODES[mode].__mro__:
        if dataclasses.is_dataclass(cls):
            names = re.findall(r"^    ([a-z_][\w, ]*?) : ", cls.__doc__ or "", re.MULTILINE)
            described |= {name for line in names for name in line.split(", ")}
    assert set(MODES[mode].fields()) <= described


def test_readme_and_the_overview_show_the_same_modes() -> None:
    readme, overview = ((ROOT / page).read_text() for page in ("README.md", "docs/modes/index.md"))
    shown = {mode for mode in OWN_MODES if f"`{mode}`" in readme}
    assert shown == {mode for mode in OWN_MODES if f"| [`{mode}`]" in overview} != set()


def test_the_page_on_modes_of_ones_own_names_every_trait() -> None:
    table = (DOCS / "new_mode.md").read_text().partition("## Traits")[2]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert {field.name for field in dataclasses.fields(ModeTraits)} <= named


def test_pages_name_the_modes_without_a_logits_cache() -> None:
    table = (DOCS / "modes" / "index.md").read_text()
    without = set(re.findall(r"^\| `(\w+)` \| \w+ \| no \|", table, re.MULTILINE))
    for page in ("index.md", "resample.md"):
        text = " ".join((DOCS / "modes" / page).read_text().split())
        (listed,) = re.findall(r"All modes except ([^.]*?) accept a", text)
        assert set(re.findall(r"`(\w+)`", listed)) == without != set()
