"""What every process of a job needs: who is who, signals, files, records and watchdogs."""
