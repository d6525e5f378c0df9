"""`pyflash bench`: attention timed beside other libraries and the machine's own limits.

``_engine`` is what measures, and the only thing here that does; ``_server`` is its other end, in the process
of each library, whose calls are in ``calls``. ``_limits`` asks the machine, ``_results`` reads and writes
files, ``_terminal`` and ``_plots`` show them, ``_cli`` is the command. How it measures is said in
docs/benchmarks.md.
"""
