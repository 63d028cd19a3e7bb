"""A script that cannot be run by its name is found, and so is a file that can and is none."""

import pytest

import check_files


@pytest.mark.parametrize(
    ("text", "mode", "errors"),
    [
        ("#!/bin/bash\n", 0o755, 0),
        ("#!/usr/bin/env python3\n", 0o644, 1),
        ("x = 1\n", 0o644, 0),
        ("x = 1\n", 0o755, 1),
    ],
)
def test_modes_go_with_first_lines(text, mode, errors):
    assert len(check_files.check_mode("tests/x", text, mode)) == errors
