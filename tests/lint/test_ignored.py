"""The files of a newcomer's first commands in a clone are neither offered for a commit nor copied into an image."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"--checkpoint_directory=([\w./-]+)", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("folder", ["build", ".gpu", ".gpu2", ".venv", "checkpoints"])
def test_git_ignores_it_and_an_image_leaves_it_out(folder, tmp_path):
    assert NAMED == ["checkpoints"]
    # In a repository of its own: a source archive has none.
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "-C", tmp_path, "check-ignore", "--quiet", f"{folder}/file"], check=True)
    assert any(Path(folder).match(pattern) for pattern in (ROOT / ".dockerignore").read_text().split())
