#!/usr/bin/env python3
"""pytest with these arguments, for ctest: exits with 77, and says why, where pytest or what the tests need is missing."""

import sys

try:
    import pytest
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)


class Count:
    """How many tests passed or failed."""

    def __init__(self):
        self.run = 0

    def pytest_runtest_logreport(self, report):
        self.run += report.when == "call" and not report.skipped


count = Count()
status = int(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[count]))
nothing_ran = count.run == 0 and status in (0, 5)
sys.exit(77 if nothing_ran else status)
