"""Signals reach the processes that tests start, also where a shell runs the tests in its background or under nohup.

Such a shell has SIGINT or SIGHUP ignored, which every child inherits and a shell script can't undo.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
