"""The runtime of a job's processes: ranks, signals, files, flight recorders and watchdogs."""
