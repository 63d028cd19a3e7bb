"""A script that cannot be run by its name is found. So are an executable that is no script, and a duration by the wall clock."""

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


@pytest.mark.parametrize(
    ("path", "line", "errors"),
    [
        ("server/heads/epoch.cc", "end = absl::Now() + wait;", 1),
        ("server/heads/epoch.cc", "mutex_.AwaitWithDeadline(condition, end);", 1),
        ("server/heads/epoch.cc", "end = observability::MonotonicNow() + wait;", 0),
        ("server/observability/logging.cc", "time = absl::Now();", 0),
        ("tests/unit/x.cc", "end = absl::Now();", 0),
    ],
)
def test_durations_of_the_server_go_by_the_steady_clock(path, line, errors):
    assert len(check_files.check_file(path, line + "\n")) == errors
