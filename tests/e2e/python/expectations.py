"""What tests expect of errors."""

import contextlib

import pytest

import headwater


@contextlib.contextmanager
def refused(reason, kind=headwater.HeadwaterError):
    """Expects an error of this class with this reason; yields what pytest.raises does."""
    with pytest.raises(kind) as info:
        yield info
    assert info.value.reason == reason, f"expected {reason}, got {info.value}"
