"""Ctrl-C reaches the processes that tests start, also where a shell runs the tests in its background.

Such a shell has SIGINT ignored, which every child inherits and a shell script can't undo.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
