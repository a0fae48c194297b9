"""A clock that is off by GSHARE_TEST_CLOCK seconds, in every Python process with this folder in PYTHONPATH."""

import os
import time

if _off := float(os.environ.get("GSHARE_TEST_CLOCK", 0)):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _off
    time.time_ns = lambda: _time_ns() + int(_off * 1e9)
