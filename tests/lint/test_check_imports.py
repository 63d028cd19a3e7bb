"""Circles of imports, and loops that repeat a call, are found in a package; what is none passes."""

import pytest

import check_imports

PASSING = {
    "__init__.py": "from headwater._client import Client\n",
    "_errors.py": "class HeadwaterError(Exception): ...\n",
    "_head.py": "from headwater import _errors\n",
    "_client.py": "from headwater._head import Head\nfrom headwater._errors import HeadwaterError\n",
    "torch/__init__.py": "from headwater.torch._losses import loss\n",
    "torch/_losses.py": "import headwater._head\n",
}


def check(folder, **changed):
    files = PASSING | {name.replace("__", "/", 1) + ".py": text for name, text in changed.items()}
    for name, text in files.items():
        path = folder / "headwater" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check_imports.check_package(folder / "headwater")


def test_a_package_without_a_circle_passes(tmp_path):
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "from headwater._client import Client\n",
        "from headwater import _client\n",
        "import headwater._client\n",
        "from . import _client\n",
        "from ._client import Client\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headwater._client import Client\n",
        "def make():\n    from headwater._client import Client\n",
        "def make():\n    import headwater.torch._losses\n",  # which imports this one
        "from headwater import Client\n",  # by way of the package
    ],
)
def test_a_circle_is_found_however_it_is_closed(tmp_path, text):
    (error,) = check(tmp_path, _head=text)
    assert "a circle of imports" in error and "headwater._head" in error


def test_a_package_within_is_part_of_what_its_modules_import(tmp_path):
    (error,) = check(
        tmp_path,
        _client="def f():\n    import headwater.torch._model\n",
        torch___model="",
        torch___losses="import headwater._client\n",
    )
    assert "headwater._client, headwater.torch, headwater.torch._losses" in error


RETRY = """
from headwater._errors import HeadwaterError
def call(work):
    while True:
        try:
            return work()
        except HeadwaterError as error:
            {}
"""
SLEEP = "import time\n\n\ndef call():\n    for _ in range(9):\n\n        time.sleep(1)\n"


@pytest.mark.parametrize("text", [SLEEP, *map(RETRY.format, ["pass", "last = error", "if error.fatal:\n                raise"])])
def test_a_loop_that_sleeps_or_continues_after_an_error_is_found(tmp_path, text):
    (error,) = check(tmp_path, _head=text)
    assert "_head.py:7: call repeats" in error


@pytest.mark.parametrize("action", ["raise", "return None", "break"])
def test_a_loop_that_ends_with_an_error_passes(tmp_path, action):
    assert check(tmp_path, _head=RETRY.format(action)) == []


def test_loops_of_the_application_pass(tmp_path):
    assert check(tmp_path, _recovery=RETRY.format("pass").replace("call", "patiently")) == []
