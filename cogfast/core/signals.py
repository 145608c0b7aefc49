"""The signals that ask a run to stop: distributed/stop_signals.py handles them, data/workers.py blocks them."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
