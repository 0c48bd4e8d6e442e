"""The runtime of every process of a job: its place in the job, signals, files, records and
watchdogs.
"""
