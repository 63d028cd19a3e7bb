"""The files of a newcomer's first commands in a clone are neither offered for a commit nor copied into an image."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# By scripts (build, .gpu), by hand, and by the README's server.
LEFT = ["build", ".gpu", ".gpu2", ".venv", *re.findall(r"--checkpoint_directory=([\w./-]+)", (ROOT / "README.md").read_text())]


def test_the_readme_names_a_folder():
    assert "checkpoints" in LEFT


@pytest.mark.parametrize("folder", LEFT)
def test_git_ignores_it(folder, tmp_path):
    # In a repository of its own: a source archive has none.
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "file").write_text("")
    status = subprocess.run(["git", "-C", str(tmp_path), "status", "--porcelain"], check=True, capture_output=True, text=True)
    assert status.stdout == "?? .gitignore\n"


@pytest.mark.parametrize("folder", LEFT)
def test_an_image_leaves_it_out(folder):
    patterns = (ROOT / ".dockerignore").read_text().split()
    assert any(Path(folder).match(pattern) for pattern in patterns)
