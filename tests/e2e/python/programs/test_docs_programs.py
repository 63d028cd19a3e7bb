"""The programs of the pages and examples run: whole ones print what the page shows, fragments run in a context of the test's.

A whole program in Python is followed by its output. A whole program in C++ is also a file of client/examples/cpp, which the build
compiles. A fragment in either language has an entry in docs_contexts.py; one in C++ is compiled.
"""

import itertools
import os
import re
import shutil
import sys
import warnings

import pytest
from certificates import make_access
from docs_blocks import PRINTED_ADDRESS, ROOT, blocks_of, check_output, pages
from docs_contexts import CONTEXTS
from expectations import run, run_python
from headwaterd import running_server

BLOCKS = [block for page in pages(None) for block in blocks_of(page)]
PROGRAMS = [block for block in BLOCKS if block[3] or "int main" in block[2]]
FRAGMENTS = [block for block in BLOCKS if block not in PROGRAMS]


def name_of(block) -> str:
    """Page, language and first line."""
    page, language, text, _ = block
    return f"{page.relative_to(ROOT)}-{language}-{text.splitlines()[0][:40]}"


def test_guides_have_programs():
    guides = set((ROOT / "docs/guides").glob("*.md")) & set(pages(None))
    assert guides and guides - {block[0] for block in PROGRAMS} <= {
        ROOT / "docs/guides/faq.md",
        ROOT / "docs/guides/coming-from.md",
        ROOT / "docs/guides/frameworks.md",
    }


def beginning_of(text: str) -> str:
    """The key of a fragment's context."""
    found = [beginning for beginning in CONTEXTS if text.startswith(beginning)]
    assert len(found) == 1, f"docs_contexts.py has {found} for {text}"
    return found[0]


def test_every_context_has_a_fragment():
    assert set(CONTEXTS) == {beginning_of(text) for _, _, text, _ in FRAGMENTS}


@pytest.mark.parametrize("block", PROGRAMS, ids=name_of)
def test_programs_print_what_the_page_shows(block, tmp_path):
    _, language, program, output = block
    assert output and PRINTED_ADDRESS in program
    with running_server() as server:
        if language == "python":
            text = program.replace(PRINTED_ADDRESS, repr(server.address))
            printed = run([sys.executable, "-W", "error::UserWarning", "-c", text], cwd=tmp_path)
        else:
            files = [file for file in (ROOT / "client/examples/cpp").glob("*.cc") if file.read_text() == program]
            assert len(files) == 1, "a whole program in C++ is a file of client/examples/cpp"
            printed = run([f"{os.environ['HEADWATER_BUILD_DIR']}/bin/example_{files[0].stem}", server.address], cwd=tmp_path)
    check_output(printed, output)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """What the fragments' files and addresses stand for; the servers that they name run."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "trainer.token").write_text("secret")
    secure = itertools.chain(*make_access(folder, "secret", tenant="team-a").values())
    with (
        running_server("--descriptor_socket={directory}/memory.sock") as plain,
        running_server("--listen_addresses=127.0.0.1:0", *secure) as secured,
    ):
        yield {
            "ADDRESS": repr(plain.address),
            PRINTED_ADDRESS: repr(plain.address),
            "headwater.example:50051": secured.address,
            "headwater-0.headwater.headwater:50051": secured.address,
            "/etc/headwater/token/token": f"{folder}/trainer.token",
            "/etc/headwater/tls/tls.": f"{folder}/client.",
            "/etc/headwater/tls/": f"{folder}/",
            '"trainer.token"': f'"{folder}/trainer.token"',
            '"ca.crt"': f'"{folder}/ca.crt"',
            '"client.': f'"{folder}/client.',
            "1000,": "20,",  # steps
        }


@pytest.mark.parametrize("block", [block for block in FRAGMENTS if block[1] == "python"], ids=name_of)
def test_fragments_in_python_run(block, servers, tmp_path, monkeypatch):
    """In this process, which has imported PyTorch."""
    text = block[2]
    program = CONTEXTS[beginning_of(text)] + text
    for printed, value in servers.items():
        program = program.replace(printed, value)
    ending = "\nif 'head' in globals(): head.delete(force=True)\n" if "head = " in program else ""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(program + ending, {"__name__": "__main__"})


@pytest.mark.parametrize("block", [block for block in FRAGMENTS if block[1] == "cpp"], ids=name_of)
def test_fragments_in_cpp_compile(block, tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    text = block[2]
    source = tmp_path / "fragment.cc"
    source.write_text(
        f'#include <string>\n#include "headwater/client/client.h"\nvoid Run() {{\n{CONTEXTS[beginning_of(text)]}{text}}}\n'
    )
    headers = [f"-I{ROOT}/client/{part}/include" for part in ("core", "cpp")]
    run([compiler, "-std=c++20", "-fsyntax-only", *headers, str(source)])


def test_a_teacher_in_its_own_process_lowers_the_divergence(each_place):
    arguments = [each_place.address] if each_place.address else []
    output = run_python(ROOT / "client/examples/python/teacher_process.py", *arguments)
    first, last = map(float, re.findall(r"divergence ([0-9.]+) nats", output))
    assert last < 0.9 * first
    if each_place.address:
        assert not [info for info in each_place.client.heads() if "example" in info.name]
