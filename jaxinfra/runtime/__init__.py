"""The runtime of a job's processes: places, signals, files, records and watchdogs."""
