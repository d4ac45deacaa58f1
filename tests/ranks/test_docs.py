"""ranks: the documentation is true: its blocks run, its tables list what the code has.

A page is a script. `python` and `toml` blocks whose first line is a comment with a file name are
written to that file, other `python` blocks are executed. In `console` blocks the lines after "$ "
are run by bash; what is printed below them must be among what they print, apart from numbers, and
`...` stands for anything. A block after `<!-- not run: ... -->` is left alone. The session of the
README has the command that is installed at first; all else is run by commands of the warm process.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headway import errors
from headway.cli.main import COMMANDS
from headway.data.order import SampleOrder
from support.commands import command, warm_variables
from support.sampling import sampled

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- not run:.*?-->\s*)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d ]*(\.\d+)?(e[-+]\d+)?( ?(ns|us|ms|s|m|KiB|MiB|GiB)\b)?")
OPTIONAL = re.compile(r"  exchange #[ %]*(?=  )|  mem #")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    run: bool

    @property
    def file(self) -> str | None:
        found = re.match(r"# ([\w./-]+\.(py|toml))\n", self.text)
        return found.group(1) if found else None


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(language, text, not skipped) for skipped, language, text in found]


def plain(line: str) -> str:
    """A line of output without what differs from run to run."""
    line = re.sub(r"\bplan [0-9a-f]{12}\b", "plan #", line.rstrip())
    line = OPTIONAL.sub("", NUMBER.sub("#", line))
    return re.sub(r"#(m#|\dm\d\ds)", "#", line)


def commands(text: str) -> tuple[str, list[str]]:
    """The script of a console block, and the lines that it says are printed."""
    script, shown = [], []
    for line in text.splitlines():
        if line.startswith("$ "):
            script.append(line[2:])
        elif line.strip() not in ("", "..."):
            shown.append(line)
    return "set -e\n" + "\n".join(script), shown


def as_installed(block: Block) -> Block:
    """The block with the installed command in the first of its lines that calls it."""
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}$PATH"
    return replace(block, text=block.text.replace("$ headway", f"$ {path} headway", 1))


def run_console(text: str, folder: Path, variables: Mapping[str, str]) -> None:
    script, shown = commands(text)
    done = command("bash", "-c", script, cwd=folder, timeout=170, variables=variables)
    printed = done.out + done.err
    assert done.code == 0, f"{script}\n{printed}"
    real = {plain(line) for line in printed.splitlines()}
    missing = [line for line in shown if plain(line) not in real]
    assert not missing, f"{script}\nnot printed: {missing}\nprinted:\n{printed}"


def run_page(page: Path, folder: Path, *, installed: bool = False) -> int:
    """Run all blocks of a page in a folder, by commands of the warm process.

    Args:
        installed: Whether the first `headway` is the one that is installed.

    Returns:
        The number of blocks.
    """
    variables = warm_variables()
    count = 0
    for block in blocks(page):
        if not block.run:
            continue
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            this = installed and "$ headway" in block.text
            run_console((as_installed(block) if this else block).text, folder, variables)
            installed = installed and not this
        elif block.language == "python":
            words = ("bash", "-c", 'exec python -c "$1"', "block", block.text)
            done = command(*words, cwd=folder, variables=variables)
            assert done.code == 0, f"{block.text}\n{done.err}"
        else:
            continue
        count += 1
    return count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_end_to_end(tmp_path):
    assert run_page(DOCS / "tutorial.md", tmp_path) >= 14
    assert (tmp_path / "runs/killed/report.html").exists()


@pytest.mark.timeout(300)
def test_the_readme_session_runs(tmp_path):
    """In a folder with the loops of docs/, as a clone has them."""
    (tmp_path / "docs").mkdir()
    for program in (PLAIN, OWN):
        shutil.copy(program, tmp_path / "docs")
    assert run_page(ROOT / "README.md", tmp_path, installed=True) >= 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    sampled([page for page in sorted(DOCS.glob("*.md")) if page.stem != "tutorial"], 12),
    ids=lambda page: page.stem,
)
def test_the_blocks_of_the_docs_run(page, tmp_path):
    run_page(page, tmp_path)


def test_a_console_block_that_shows_what_is_not_printed_fails(tmp_path):
    run_console("$ echo step 7, 3.5 ms\nstep 12, 99 ms\n...\n", tmp_path, {})
    with pytest.raises(AssertionError, match="not printed"):
        run_console("$ echo step 7\nstep 7 of 9\n", tmp_path, {})
    with pytest.raises(AssertionError, match="false"):
        run_console("$ false\n", tmp_path, {})


# -- the own loop ------------------------------------------------------------------------------

PLAIN, OWN = DOCS / "plain_loop.py", DOCS / "headway_loop.py"


def changes() -> list[str]:
    lines = (path.read_text(encoding="utf-8").splitlines() for path in (PLAIN, OWN))
    return [
        line
        for line in difflib.unified_diff(*lines, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]


def losses(words: str, cwd: Path) -> list[str]:
    done = command("bash", "-c", words, cwd=cwd, variables=warm_variables())
    assert done.code == 0, done.err
    # Two processes may write into one line.
    return re.findall(r"loss (\d\.\d{4})", done.out)


def test_docs_own_loop_changes_at_most_five_lines_and_the_readme_shows_them():
    new = [line for line in changes() if line.startswith("+")]
    assert len(new) <= 5
    (shown,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "diff")
    marked = [line for line in shown.splitlines() if line[:1] in "+-" and line[1:].strip()]
    assert marked == changes()
    for line in shown.splitlines():
        if line[:1] == " " and line.strip() != "...":
            assert line[1:] in PLAIN.read_text(encoding="utf-8")


@pytest.mark.timeout(180)
def test_docs_own_loop_is_the_plain_loop_on_any_number_of_processes(tmp_path):
    """The plain loop in the order of headway prints the same losses as one and two processes."""
    alone = losses(f"python {PLAIN}", tmp_path)
    assert len(alone) == 5
    assert float(alone[-1]) < 0.2
    text = PLAIN.read_text(encoding="utf-8")
    shuffled = "in loader:"
    assert shuffled in text
    orders = [SampleOrder(1200, seed=0).indices(epoch, 0, 1200).tolist() for epoch in range(5)]
    ordered = "in DataLoader(torch.utils.data.Subset(dataset, ORDERS[epoch]), batch_size=64):"
    serial = tmp_path / "serial.py"
    serial.write_text(f"ORDERS = {orders}\n{text.replace(shuffled, ordered)}", encoding="utf-8")
    expected = losses("python serial.py", tmp_path)
    assert losses(f"python {OWN}", tmp_path) == expected
    two = losses(f"torchrun --standalone --nproc-per-node 2 {OWN}", tmp_path)
    assert sorted(two) == sorted(expected * 2)


# -- completeness ------------------------------------------------------------------------------


def error_classes() -> list[type[errors.HeadwayError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, errors.HeadwayError)]


def test_docs_list_every_error_with_code_and_exit_code():
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (HW-\d+) \| `(\w+)` \| (\d+) \|", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(
        (kind.code, kind.__name__, str(kind.exit_code)) for kind in error_classes()
    )
    assert len(rows) == len(set(rows)) > 15


def test_docs_list_every_field_of_recipe_and_key_of_recipe_toml():
    from dataclasses import fields

    from headway.run.recipe.recipe import Recipe
    from headway.run.recipe.schema import RecipeDocument, RecipeReference

    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    of_code = {part.name for kind in (Recipe, RecipeDocument) for part in fields(kind)}
    assert rows >= of_code
    assert rows - of_code <= {part.name for part in fields(RecipeReference)} | {
        "call", "criterion", "memmap", "window", "dtype"
    }  # fmt: skip


def test_docs_name_every_command():
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for known in COMMANDS:
        assert f"headway {known.words}" in text, known.words


def test_docs_name_only_commands_that_there_are():
    words = {known.words for known in COMMANDS} | {"--help", "--version", "COMMAND --help"}
    first = {word.split()[0] for word in words}
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for found in re.findall(r"(?:^\$ |`)headway ([\w-]+)", page.read_text(), flags=re.M):
            assert found in first, f"{page.name}: headway {found}"


def test_docs_name_tests_that_there_are():
    """The proof of a claim is named as `tests/folder/test_file.py`, with a test's name."""
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
            file = ROOT / path
            assert file.exists(), f"{page.name}: {path}"
            if name:
                assert f"def {name}(" in file.read_text(), f"{page.name}: {path}::{name}"
        for path in re.findall(r"`(src/headway/[\w/]+(?:\.py|/))`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_docs_picture_is_made_by_the_script(tmp_path):
    """The script still works on a run directory, and what it makes has the form of the picture."""
    from support.run_directories import write_run

    sys.path.insert(0, str(DOCS))
    try:
        from make_images import picture
    finally:
        sys.path.remove(str(DOCS))
    made = picture(write_run(tmp_path / "run"))
    assert made.count("<svg") == 3
    committed = (DOCS / "images" / "run.svg").read_text(encoding="utf-8")
    assert committed.count("<svg") == 3
    assert 'src="http' not in committed


def test_docs_show_the_version_in_the_changelog():
    import headway

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{headway.__version__}]" in text
