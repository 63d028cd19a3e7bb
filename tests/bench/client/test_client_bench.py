"""The benchmark of calls measures every client, of one build and of two."""

import os


def test_each_client_is_measured(smoke_run):
    values = smoke_run("client", "--before", os.environ["HEADWATER_BUILD_DIR"])
    assert len(values) == 2 * 6 + 2 + 3 and all(value > 0 for value in values.values())
